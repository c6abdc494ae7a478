"""Adaptive attention scaling (AAS): attack a model through scaled attention (Jain & Dutta, CVPR 2024).

Saturated softmax attention passes hardly any gradient. The paper scales the scores of every attention by factors that
move the features as far as possible from the original model's, and attacks the scaled model. It seems to judge success
on the scaled model, too, which says nothing about the deployed one. Here only the deployed model counts, and the plain
attack runs as well; the paper's way of counting is reported as sample info.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.factors import (
    DISTANCES,
    Calibration,
    search_factors,
    search_factors_as_printed,
)
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, merge_info, run_attack
from vitadel.attacks.pgd import PGD
from vitadel.attacks.surrogate import Surrogate, changed, deployed, seen_through
from vitadel.attacks.wrappers import not_fooled
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError, check_known
from vitadel.instrument.attention import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

PAPER_STYLE = "paper_style"
"""The sample info of an attack on a changed model: whether that model still gives the label."""

_GRID = (0.1, 0.01, 0.001)  # the paper's fixed factors, which compete with the factors found by the search
_PROBE_STEPS = 10
_STREAM = "rescaled"  # the random stream of a search through scaled attention


@dataclass(frozen=True)
class Rescaled:
    """An attack on the model with scaled attention, then the plain attack on the samples that are not fooled.

    `factors`: one number, or one per softmax attention. With `backward_only` the forward pass is that of the deployed
    model and only gradients pass through scaled attention. With `literal` the search stops where the scaled model is
    fooled, as in the paper. The plain attack uses the random numbers that it uses alone, so both together are never
    weaker. With `paper_style` the sample info also counts as the paper does.
    """

    attack: Attack
    factors: float | tuple[float, ...] = 0.01
    backward_only: bool = False
    literal: bool = False
    paper_style: bool = False

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        check_pixels(x)
        attentions_of(model)  # refuses a model without known attention before anything is computed
        view = seen_through(model, lambda inner: changed(inner, self._change))
        if not self._gives_own_verdicts:
            view = Surrogate(view, deployed(model))
        z, info = run_attack(self.attack, view, x, y, rng.stream(_STREAM), with_info)
        style = {}
        if with_info and self.paper_style:
            style[PAPER_STYLE] = self._scaled_model_correct(model, x, y, rng, z)
        rest = not_fooled(model, z, y)
        if len(rest):
            z = z.clone()  # an attack may have returned the clean images themselves
            z[rest], new = run_attack(self.attack, model, x[rest], y[rest], rng[rest], with_info)
            merge_info(info, new, rest, len(x))
        return z, {**info, **style}

    @property
    def _gives_own_verdicts(self) -> bool:
        """With scaled gradients only, the logits are the deployed model's, so no second pass is needed."""
        return self.literal or self.backward_only

    def _scaled_model_correct(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, z: Tensor) -> Tensor:
        """Whether the scaled model, attacked by itself to the end, still gives the label.

        `z` decides only where it fools the scaled model, too: a search stops as soon as the deployed model is fooled.
        """
        scaled = changed(deployed(model), partial(scaled_attention, factors=self.factors))

        def is_correct(images: Tensor, labels: Tensor) -> Tensor:
            with frozen(model), torch.no_grad():
                logits: Tensor = scaled(images)
            return logits.argmax(1) == labels

        correct = is_correct(z, y)
        if not self.literal and bool(correct.any()):
            attacked = self.attack(scaled, x[correct], y[correct], rng[correct].stream(_STREAM))
            correct[correct.clone()] = is_correct(attacked, y[correct])
        return correct

    def _change(self, model: nn.Module) -> AbstractContextManager[None]:
        return scaled_attention(model, self.factors, backward_only=self.backward_only)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # Every pass of the scaled model may need one of the deployed model.
        second = 0 if self._gives_own_verdicts else gradients + forwards
        runs, verdicts = 2, 1
        if self.paper_style:
            runs, verdicts = runs + (not self.literal), verdicts + 1 + (not self.literal)
        return runs * gradients, runs * forwards + second + verdicts


@dataclass(frozen=True)
class AAS:
    """Search universal factors on calibration images, then attack through them.

    By default: gradient ascent on the logarithms of the factors in steps of `pace` decades, `ascent_steps` on each
    batch, from one random start, away from the original model's features. With `select` the result competes with
    uniform factors of 0.1, 0.01 and 0.001, and the factors win whose 10-step PGD raises the deployed model's loss most.
    `literal` is algorithm 1 as printed in the paper.
    """

    attack: Attack
    backward_only: bool = False
    literal: bool = False
    images: int = 1280
    ascent_steps: int = 10
    pace: float = 0.3
    distance: str = "lpips"
    select: bool = True
    paper_style: bool = False

    def __post_init__(self) -> None:
        check_known("distance", self.distance, DISTANCES)
        if min(self.images, self.ascent_steps) < 1:
            raise UserError(
                f"aas needs at least 1 calibration image and 1 step, got {self.images} and {self.ascent_steps}"
            )

    @property
    def calibration_images(self) -> int:
        return self.images

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        raise UserError(
            "aas must find its factors on calibration images first, which are not the attacked ones: call "
            "attack.prepared(model, [(images, labels), ...]) and use what it returns; `vitadel audit` does so by itself"
        )

    def prepared(self, model: nn.Module, calibration: Calibration, seed: int = 0) -> Rescaled:
        """The attack through the factors found; only `select` uses the labels."""
        rng = SampleRNG.of_samples(seed, [0]).stream("aas factors")
        with frozen(model):
            if self.literal:
                factors = search_factors_as_printed(model, calibration, rng, self.ascent_steps)
            else:
                factors = search_factors(model, calibration, rng, self.ascent_steps, self.pace, self.distance)
            if self.select and not self.literal:
                factors = self._most_harmful(model, calibration, factors, seed)
        return self._through(factors)

    def _through(self, factors: tuple[float, ...]) -> Rescaled:
        return Rescaled(self.attack, factors, self.backward_only, self.literal, self.paper_style)

    def passes(self) -> tuple[int, int]:
        """The passes of the attack itself; the calibration is shared by all samples."""
        return self._through(()).passes()

    def _most_harmful(
        self, model: nn.Module, calibration: Calibration, found: tuple[float, ...], seed: int
    ) -> tuple[float, ...]:
        """The candidate with the largest loss of the deployed model after a short PGD, on the first batch."""
        x, y = next(iter(calibration), (None, None))
        if x is None or y is None:
            raise UserError(
                "aas must iterate over its calibration images twice: give a list of (images, labels), not an empty one "
                "or an iterator"
            )
        candidates = [found, *((factor,) * len(found) for factor in _GRID)]
        losses = [self._loss_after_probe(model, x, y, candidate, seed) for candidate in candidates]
        return candidates[losses.index(max(losses))]

    def _loss_after_probe(self, model: nn.Module, x: Tensor, y: Tensor, factors: tuple[float, ...], seed: int) -> float:
        probe = PGD(_innermost_threat(self.attack), steps=_PROBE_STEPS, stop_when_fooled=False)
        scaled = changed(model, self._through(factors)._change)
        z = probe(scaled, x, y, SampleRNG.of_samples(seed, range(len(x)), x.device))
        with torch.no_grad():
            return float(cross_entropy(model(z), y).double().mean())


def _innermost_threat(attack: Attack) -> Threat:
    inner = getattr(attack, "attack", None) or next(iter(getattr(attack, "attacks", ())), None)
    if inner is not None:
        return _innermost_threat(inner)
    threat: Threat = attack.threat  # type: ignore[attr-defined]
    return threat


def aas(
    attack: Attack,
    images: int = 1280,
    steps: int = 10,
    pace: float = 0.3,
    distance: str = "lpips",
    select: bool = True,
    paper_style: bool = True,
    *,
    backward_only: bool = False,
) -> Attack:
    return AAS(attack, backward_only, False, images, steps, pace, distance, select, paper_style)


def aas_paper(attack: Attack, images: int = 1280, steps: int = 10) -> Attack:
    return AAS(attack, False, True, images, steps, paper_style=True)


def scale(attack: Attack, factor: float = 0.01, paper_style: bool = True) -> Attack:
    return Rescaled(attack, factor, paper_style=paper_style)
