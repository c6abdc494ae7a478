"""Checks of whether an image has one output: in every call, in every batch, with and without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitadel.attacks.parse import make
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome, check
from vitadel.diagnosis.examination import Examination, attack_cost, relative_change
from vitadel.findings import RANDOM_OUTPUTS
from vitadel.statistics import significantly_fewer

_FLOOR = 0.05  # of all images: how many more an averaged attack may break


@check(*RANDOM_OUTPUTS, cost=(0, 1.75), next="autoattack-rand")
def random_outputs(e: Examination) -> Outcome:
    """Raised if the same images get different logits in a second call, after other images.

    Why it matters: if outputs are random, or depend on earlier images, a verdict from a single pass is luck. An attack
    that averages over the randomness is stronger than one that does not.

    What to do: attack it with eot:20+ before each attack or with autoattack-rand, and judge over several passes.
    """
    return (SUSPICIOUS if e.is_random else OK), {"change of logits": e.output_noise}


@check("batch-dependence", "Outputs depend on the other images of the batch", cost=(0, 0.6))
def batch_dependence(e: Examination) -> Outcome:
    """Raised if the output for an image depends on the other images of its batch.

    Why it matters: an attack changes a whole batch at once, the judge uses other batches, and the deployed model
    single images: three different models. Batch statistics in eval mode are the usual cause.

    What to do: use running statistics (track_running_stats=True, and eval mode), or audit with --batch-size 1.
    """
    _refuse_random(e)
    images = e.first(12)
    with torch.no_grad():  # in one batch, however small those of the attacks are
        together: Tensor = e.model(images)
        noise = e.rng_of(8).uniform(*images.shape[1:]).to(images)
        beside_noise: Tensor = e.model(torch.cat([images[:4], noise]))[:4]
    alone = torch.cat([e.logits_of(one) for one in images.split(1)])
    change = max(relative_change(together, alone), relative_change(together[:4], beside_noise))
    flipped = int((together.argmax(1) != alone.argmax(1)).sum())
    evidence = {"change of logits": change, "predictions changed": flipped, "of": len(images)}
    return e.verdict_on_change(change, flipped), evidence


def _refuse_random(e: Examination) -> None:
    if e.is_random:
        raise NotExamined("the model's outputs are random, so two passes differ anyway")


@check("gradient-mode", "Outputs change when gradients are enabled", cost=(0, 0.5), next="square")
def gradient_mode(e: Examination) -> Outcome:
    """Raised if outputs differ between a pass with gradients enabled and one without.

    Why it matters: attacks then maximize the loss of another function than the one that is deployed and judged, by
    design (secrets that only inference uses) or by accident (a branch on requires_grad).

    What to do: let attacks see what is deployed. If a part is meant to be secret, give it to the attacker as well: a
    secret is no defense once it is known (`vitadel threat-levels` measures what it is worth).
    """
    _refuse_random(e)
    images = e.first(16)
    plain = e.logits_of(images)
    with torch.enable_grad():
        tracked = torch.cat([e.model(x.clone().requires_grad_()).detach() for x in images.split(e.batch_size)])
    change = relative_change(plain, tracked)
    flipped = int((plain.argmax(1) != tracked.argmax(1)).sum())
    # Fused kernels may round differently when a graph is recorded.
    return e.verdict_on_change(change, flipped), {"change of logits": change, "predictions changed": flipped}


class _GradientCounter(TorchFunctionMode):
    """Counts calls that compute gradients."""

    counted = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.counted
        return func(*args, **(kwargs or {}))


@check("test-time-optimization", "The model computes gradients at inference", cost=(0, 0.1), next="square")
def inference_gradients(e: Examination) -> Outcome:
    """Raised if the model computes gradients of its own during a forward pass.

    Why it matters: it optimizes the image, or itself, at inference (purification, anti-adversaries, test-time
    adaptation). Attacks seldom differentiate through such a loop, so they see gradients of a part of the model only,
    and every output costs many passes. None of the defenses of this kind that were evaluated with care was much better
    than the model inside (Croce et al. 2022, arXiv:2202.13711).

    What to do: attack the model inside without its loop, judge on the whole, and run square; report the worst case
    beside that of the model inside.
    """
    with _GradientCounter() as counter:
        e.logits_of(e.first(min(4, e.batch_size)))
    return (SUSPICIOUS if counter.count else OK), {"gradients taken per answer": counter.count}


@check("zero-budget", "An attack with eps 0 changes predictions", cost=(3, 1))
def zero_budget(e: Examination) -> Outcome:
    """Raised if an attack with a budget of zero changes an image or a prediction.

    Why it matters: with eps = 0 an attacker can do nothing, so robust and clean accuracy must be equal. If they are
    not, outputs differ between calls, or pixels are changed on the way.

    What to do: make the model deterministic in eval mode, or judge it over many passes (eot:20+ before an attack).
    """
    z = e.craft(make(f"pgd-{min(e.level.steps, 3)}", eps=0, norm=e.norm))
    moved = float((z - e.x).abs().max())
    changed = int((e.logits_of(z).argmax(1) != e.logits.argmax(1)).sum())
    return (BROKEN if moved > 1e-6 or changed else OK), {"largest change": moved, "predictions changed": changed}


@check(
    "eot",
    "Averaging over the model's randomness finds more",
    cost=lambda level: attack_cost(level.eot),
    attacks=lambda level: (level.plain,),
    if_random=True,
    next="autoattack-rand",
)
def eot(e: Examination) -> Outcome:
    """Raised if averaging over the model's randomness makes the attack clearly stronger.

    Why it matters: the gradient of one pass follows the noise of that pass. Images that are robust to it may be broken
    with the mean of several passes (expectation over transformation, Athalye et al. 2018), so the plain number is only
    an upper bound.

    What to do: report numbers with eot:20+ or autoattack-rand, with more passes until they no longer fall.
    """
    if not e.is_random:
        raise NotExamined("the model's outputs are not random, so there is nothing to average")
    plain, averaged = e.robust(e.level.plain), e.robust(e.level.eot)
    evidence = {e.level.plain: e.share(plain), e.level.eot: e.share(averaged)}
    return (SUSPICIOUS if significantly_fewer(plain, averaged, _FLOOR) else OK), evidence
