"""Checks of softmax attention: is it saturated, and does an attack through softened attention find more?"""

from __future__ import annotations

import torch
from torch import Tensor

from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.parse import make
from vitadel.backbones.anatomy import attentions_of
from vitadel.diagnosis.examination import Examination, Level
from vitadel.diagnosis.finding import OK, SUSPICIOUS, NotExamined, Outcome
from vitadel.errors import UserError
from vitadel.evaluation.chance import beaten
from vitadel.instrument.attention import scaled_attention, score_statistics
from vitadel.types import Calibrated

__all__ = ["attention_saturation", "attention_scaling", "cost_of_scaling", "softening_factors"]

_ROUNDS_TO_ONE = {torch.float64: 36.7, torch.float32: 16.6, torch.float16: 7.6, torch.bfloat16: 5.5}
_LEAVES_NORMAL = {torch.float64: 708.0, torch.float32: 87.3, torch.float16: 9.7, torch.bfloat16: 87.3}
_SATURATED = 0.25  # share of a block's rows
_FLOOR = 0.03
_SOFT = 2.0  # the gap that softened attention is brought to
_LEARNT_ON = 64  # images for the adaptive factors
_TO_LEARN = 50  # gradients on each: ten to climb, and ten under each of four candidates


def _gaps(e: Examination) -> list[Tensor]:
    """Of every attention, over images, heads and queries: the largest score less the second largest."""
    try:
        attentions_of(e.model)
    except UserError as unknown:
        raise NotExamined(f"its attention is not known: {unknown}") from None
    parts = []
    for x in e.few(16).split(e.batch_size):
        with torch.no_grad(), score_statistics(e.model) as gaps:
            e.model(x)
            parts.append([gap.flatten().float() for gap in gaps])
    whole = [torch.cat(of_one) for of_one in zip(*parts, strict=True)]
    return [gap[gap.isfinite()] for gap in whole]  # a row with a single key has nothing to choose, whatever its score


def attention_saturation(e: Examination) -> Outcome:
    """Raised if in some block a quarter of all attention rows are one-hot to the last bit of the model's precision.

    Why it matters: from a gap of 16.6 between the two best scores on, float32 rounds the softmax to exactly one; from
    87 on the rest leaves its normal range, and from 103 on it is zero. Hardly any gradient passes such a row, whatever
    the model would do under larger changes (Jain & Dutta, CVPR 2024).

    What to do: compare pgd-100 with aas+pgd-100 at equal compute, and with a run in float64.
    """
    gaps = [gap for gap in _gaps(e) if len(gap)]
    if not gaps:
        raise NotExamined("every row of its attention has a single key")
    precision = next((p.dtype for p in e.model.parameters() if p.is_floating_point()), torch.float32)
    at, beyond = _ROUNDS_TO_ONE[precision], _LEAVES_NORMAL[precision]
    saturated = [float((gap > at).double().mean()) for gap in gaps]
    evidence = {
        "rounds to one from": at,
        "rows beyond, per block": [round(share, 4) for share in saturated],
        "rows beyond the normal range, per block": [round(float((gap > beyond).double().mean()), 4) for gap in gaps],
        "median gap, per block": [round(float(gap.median()), 3) for gap in gaps],
        "99th percentile, per block": [round(_quantile(gap, 0.99), 3) for gap in gaps],
    }
    return (SUSPICIOUS if max(saturated) > _SATURATED else OK), evidence


def _quantile(gap: Tensor, share: float) -> float:
    """By rank: torch's own quantile refuses more than 16 million values."""
    return float(gap.kthvalue(max(1, int(share * len(gap)))).values) if len(gap) else 0.0


def softening_factors(gaps: list[Tensor]) -> tuple[float, ...]:
    """One factor per attention, such that 9 of 10 rows have a gap of at most 2; a tenth everywhere if they have."""
    tenths = [_quantile(gap, 0.9) for gap in gaps]
    factors = tuple(min(1.0, _SOFT / max(tenth, 1e-12)) for tenth in tenths)
    return factors if min(factors) < 1 else (0.1,) * len(gaps)


def cost_of_scaling(level: Level) -> tuple[float, float]:
    """Of the softened attack and, after an alarm, of random factors and a run in float64, which counts as two; at the
    thorough level of the adaptive attack, too, and of finding its factors on other images."""
    search = make(level.plain)
    gradients, forwards = Rescaled(search).passes()
    alone, asked = search.passes()
    adaptive = level.name == "thorough"
    times = 3 if adaptive else 2
    found = _LEARNT_ON * _TO_LEARN / level.images if adaptive else 0.0
    return times * gradients + 2 * alone + found, times * (forwards + 1) + 2 * asked + 3.25


def attention_scaling(e: Examination) -> Outcome:
    """Raised if an attack through softened attention breaks clearly more images than as many plain steps or more.

    Why it matters: then saturated attention hides gradients, and the plain number is too high. Random factors and a run
    in float64 are told beside it: they show whether softening as such, its size, or mere rounding makes the
    difference. The softened model is asked for gradients only; how often it is right tells how far it is from the real
    one.

    What to do: report aas+pgd-100 or aas+gama-100 with the worst case, judged on the deployed model.
    """
    factors = softening_factors(_gaps(e))
    search = make(e.level.plain, eps=e.eps, norm=e.norm)
    plain = e.held(e.level.restarted)
    soft = e.held("softened", Rescaled(search, factors))
    evidence = {e.level.restarted: e.share(plain), "softened": e.share(soft), "factors": [round(f, 6) for f in factors]}
    with scaled_attention(e.model, factors):
        evidence["clean, of the softened model"] = e.share(e.answers(e.x).argmax(1) == e.y)
    best = soft
    images = e.others(_LEARNT_ON) if e.level.name == "thorough" else []
    if images:
        adaptive: Calibrated = AAS(search, images=_LEARNT_ON)
        best = soft & e.held("adaptive", adaptive.prepared(e.model, images, e.seed))
        evidence["adaptive factors"] = e.share(best)
    if not beaten(plain, best, _FLOOR):
        return OK, evidence
    lot = 10 ** (-2 * e.lots(1).stream("random factors").uniform(len(factors))[0])
    control = Rescaled(search, tuple(float(factor) for factor in lot))
    evidence["random factors"] = e.share(e.held("random factors", control))
    return SUSPICIOUS, evidence | {"in float64": _in_float64(e)}


def _in_float64(e: Examination) -> float | str:
    """What the plain attack leaves standing where rounding cannot be the cause; or why that is not known."""
    if e.exact is e.model:
        return "the model does not run in float64"
    try:
        z = e.crafted(make(e.level.plain, eps=e.eps, norm=e.norm), e.exact, e.x.double())
        return e.share((e.answers(z, e.exact).argmax(1) == e.y) & e.correct)
    except RuntimeError as fault:  # twice the memory; the verdict stands without it
        return f"left out: {type(fault).__name__}: {fault}"
