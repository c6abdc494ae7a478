"""Checks of whether an image has one answer: whatever the mode, the call, the neighbours in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitadel.backbones.model_checks import modules_in_train_mode
from vitadel.diagnosis.examination import Examination, relative_change
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, NotExamined, Outcome
from vitadel.evaluation.chance import beaten

__all__ = ["batch_composition", "eot_gap", "evaluation_mode", "same_answer_twice"]

_FLOOR = 0.05


def evaluation_mode(e: Examination) -> Outcome:
    """Raised if modules were given in train mode; broken if that changes predictions.

    Why it matters: in train mode dropout answers at random and batch norm mixes the images of a batch. Here everything
    else is examined in eval mode; a deployment that forgets to switch is another model.

    What to do: call model.eval() before deploying and before measuring.
    """
    training = modules_in_train_mode(e.model)
    if not training:
        return OK, {"modules in train mode": 0}
    few = e.few(32)
    with untouched_buffers(e.model):
        as_given = e.answers(few)
    change = relative_change(e.logits[: len(few)], as_given)
    flipped = int((as_given.argmax(1) != e.logits[: len(few)].argmax(1)).sum())
    evidence = {"modules in train mode": len(training), "the first": training[0], "change of logits": change}
    return (BROKEN if flipped else SUSPICIOUS), evidence | {"predictions changed": flipped, "of": len(few)}


@contextmanager
def untouched_buffers(model: nn.Module) -> Iterator[None]:
    """Running statistics that passes in train mode would change are put back."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def same_answer_twice(e: Examination) -> Outcome:
    """Raised if the same images get other logits when they are asked about again, after others.

    Why it matters: against a model that answers at random, or remembers what it has seen, the verdict of a single pass
    is luck. An attack that averages over the randomness is stronger than one that does not.

    What to do: attack it with eot:20+ before each attack or with autoattack-rand, and judge over several passes.
    """
    return (SUSPICIOUS if e.at_random else OK), {"change of logits": e.randomised}


def batch_composition(e: Examination) -> Outcome:
    """Raised if the answer to an image depends on the other images of its batch.

    Why it matters: an attack moves a whole batch at once, the judge sees other batches, and the deployed model single
    images. All three then speak about different models. Batch statistics in eval mode are the usual reason.

    What to do: use running statistics (track_running_stats=True, and eval mode), or audit with --batch-size 1.
    """
    if e.at_random:
        raise NotExamined("the model answers at random, so two passes differ anyway")
    few = e.few(12)
    with torch.no_grad():  # in one batch, however small those of the attacks are
        together: Tensor = e.model(few)
        beside_noise: Tensor = e.model(torch.cat([few[:4], e.lots(8).uniform(*few.shape[1:]).to(few)]))[:4]
    alone = torch.cat([e.answers(one) for one in few.split(1)])
    change = max(relative_change(together, alone), relative_change(together[:4], beside_noise))
    flipped = int((together.argmax(1) != alone.argmax(1)).sum())
    evidence = {"change of logits": change, "predictions changed": flipped, "of": len(few)}
    return e.verdict_on_change(change, flipped), evidence


def eot_gap(e: Examination) -> Outcome:
    """Raised if averaging over the model's randomness makes the attack clearly stronger.

    Why it matters: the gradient of one pass points along that pass's noise. What withstands it may fall to the mean of
    several passes (expectation over transformation, Athalye et al. 2018), so the plain number is an upper bound only.

    What to do: report numbers with eot:20+ or autoattack-rand, with more passes until they no longer fall.
    """
    if not e.at_random:
        raise NotExamined("the model gives the same answer twice, so there is nothing to average")
    plain, averaged = e.held(e.level.plain), e.held(e.level.eot)
    evidence = {e.level.plain: e.share(plain), e.level.eot: e.share(averaged)}
    return (SUSPICIOUS if beaten(plain, averaged, _FLOOR) else OK), evidence
