"""Checks of softmax attention: is it saturated, and does an attack through scaled attention find more?"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.attention_scaling.gaps import ROUNDS_TO_ONE, SATURATED, precision_of, quantile, softening
from vitadel.attacks.parse import make
from vitadel.diagnosis.checks import OK, SUSPICIOUS, NotExamined, Outcome, check
from vitadel.diagnosis.examination import Examination, Level
from vitadel.errors import UserError
from vitadel.instrument.attention import scaled_attention, score_statistics
from vitadel.statistics import significantly_fewer
from vitadel.types import Calibrated

_LEAVES_NORMAL = {torch.float64: 708.0, torch.float32: 87.3, torch.float16: 9.7, torch.bfloat16: 87.3}
_GAIN = 0.03  # share of all images that scaled attention may break beyond the plain attack
_CALIBRATION_IMAGES = 64  # for the adaptive factors, of which those are used that cost at most the attack on 25


def _score_gaps(e: Examination) -> list[Tensor]:
    """For every attention, over images, heads and queries: the largest score minus the second largest."""
    parts = []
    for x in e.first(16).split(e.batch_size):
        with ExitStack() as block:
            try:
                gaps = block.enter_context(score_statistics(e.model))
            except UserError as unknown:
                raise NotExamined(f"its attention is not known: {unknown}") from None
            e.logits_of(x)
            parts.append([gap.flatten().float() for gap in gaps])
    whole = [torch.cat(of_one) for of_one in zip(*parts, strict=True)]
    return [gap[gap.isfinite()] for gap in whole]  # a row with a single key has no second score


@check("attention-saturation", "Attention is saturated", cost=(0, 0.25), next="aas+pgd-100")
def attention_saturation(e: Examination) -> Outcome:
    """Raised if in some block a quarter of all attention rows are one-hot to the last bit of the model's precision.

    Why it matters: from a gap of 16.6 between the two largest scores, float32 rounds the softmax to exactly one; from
    87 the rest leaves its normal range, and from 103 it is zero. Hardly any gradient passes such a row, whatever the
    model would do under larger changes (Jain & Dutta, CVPR 2024).

    What to do: compare pgd-100 with aas+pgd-100 at equal compute, and with a run in float64.
    """
    gaps = [gap for gap in _score_gaps(e) if len(gap)]
    if not gaps:
        raise NotExamined("every row of its attention has a single key")
    precision = precision_of(e.model)
    at, beyond = ROUNDS_TO_ONE[precision], _LEAVES_NORMAL[precision]
    saturated = [e.share(gap > at) for gap in gaps]
    evidence = {
        "rounds to one from": at,
        "rows beyond, per block": [round(share, 4) for share in saturated],
        "rows beyond the normal range, per block": [round(e.share(gap > beyond), 4) for gap in gaps],
        "median gap, per block": [round(float(gap.median()), 3) for gap in gaps],
        "99th percentile, per block": [round(quantile(gap, 0.99), 3) for gap in gaps],
    }
    return (SUSPICIOUS if max(saturated) > SATURATED else OK), evidence


def softening_factors(gaps: list[Tensor]) -> tuple[float, ...]:
    """One factor per attention, so that 9 of 10 rows have a gap of at most 2; 0.1 everywhere if they already do."""
    factors = softening(gaps)
    return factors if min(factors) < 1 else (0.1,) * len(gaps)


def _scaling_cost(level: Level) -> tuple[float, float]:
    """Cost of the softened attack and, after an alarm, of random factors and a run in float64, which counts as two; at
    the thorough level also of the adaptive attack, and of finding its factors on other images."""
    search = make(level.plain)
    gradients, forwards = Rescaled(search).passes()
    plain_gradients, plain_forwards = search.passes()
    times = 2 + (1 + 25 / level.images) * (level.name == "thorough")  # with the calibration, which may cost 25 attacks
    return times * gradients + 2 * plain_gradients, times * (forwards + 1) + 2 * plain_forwards + 3.25


@check(
    "attention-scaling",
    "An attack through scaled attention finds more",
    cost=_scaling_cost,
    attacks=lambda level: (level.restarted,),
    next="aas+gama-100",
)
def attention_scaling(e: Examination) -> Outcome:
    """Raised if an attack through softened attention breaks clearly more images than at least as many plain steps.

    Why it matters: saturated attention hides gradients, and the plain number is too high. Random factors and a run in
    float64 are reported beside it: they show whether softening as such, its size, or only rounding makes the
    difference. The softened model only provides gradients; its clean accuracy shows how far it is from the real one.

    What to do: report aas+pgd-100 or aas+gama-100 with the worst case, judged on the deployed model.
    """
    factors = softening_factors(_score_gaps(e))
    search = make(e.level.plain, eps=e.eps, norm=e.norm)
    plain = e.robust(e.level.restarted)
    soft = e.robust("softened", Rescaled(search, factors))
    evidence = {e.level.restarted: e.share(plain), "softened": e.share(soft), "factors": [round(f, 6) for f in factors]}
    with scaled_attention(e.model, factors):
        evidence["clean, of the softened model"] = e.share(e.logits_of(e.x).argmax(1) == e.y)
    best = soft
    images = e.other_images(_CALIBRATION_IMAGES) if e.level.name == "thorough" else []
    if images:
        adaptive: Calibrated = AAS(search, finalists=1)
        best = soft & e.robust("adaptive", adaptive.prepared(e.model, images, e.seed))
        evidence["adaptive factors"] = e.share(best)
    if not significantly_fewer(plain, best, _GAIN):
        return OK, evidence
    drawn = 10 ** (-2 * e.rng_of(1).stream("random factors").uniform(len(factors))[0])
    control = Rescaled(search, tuple(float(factor) for factor in drawn))
    evidence["random factors"] = e.share(e.robust("random factors", control))
    return SUSPICIOUS, evidence | {"in float64": _robust_in_float64(e)}


def _robust_in_float64(e: Examination) -> float | str:
    """Robust accuracy to the plain attack without rounding, or why that is not known."""
    if e.double_model is e.model:
        return "the model does not run in float64"
    try:
        z = e.craft(make(e.level.plain, eps=e.eps, norm=e.norm), e.double_model, e.x.double())
        return e.share((e.logits_of(z, e.double_model).argmax(1) == e.y) & e.correct)
    except RuntimeError as fault:  # needs twice the memory; the verdict is valid without it
        return f"left out: {type(fault).__name__}: {fault}"
