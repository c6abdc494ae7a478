"""The gain ratio: what a step delivers against what its gradient promised.

A step from z to z' promises <gradient, z' - z> and delivers value(z') - value(z). The ratio of the two is that of
trust-region methods (Conn, Gould & Toint 2000): 1 for a linear model, between 0 and 1 where the value bends, and 0 or
less, over most steps of one length, where gradients say nothing about moves of this length: they are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.attacks.losses import margin
from vitadel.attacks.threats import dual_order
from vitadel.instrument.hooks import frozen
from vitadel.statistics import wilson
from vitadel.types import Loss, Threat

STEP = 0.25
"""The usual step of an attack, in units of eps."""

SCALES = (0.25, 1.0, 4.0)
"""The lengths at which gains are compared, in units of an attack's step."""

GAINS = "gains"
"""The sample info of a search: the sums of a `GainRecorder`."""

KINDS = ("free", "cornered")
"""Steps that follow their gradient, and those in a corner of ball and box, where most of it points outward.

What is left of a cornered step promises little, and curvature decides its gain in honest models, too.
"""

TERMS = ("steps", "failed", "wild", "ratio", "promised", "delivered")
"""What is summed over steps: their number, those that delivered nothing, those that delivered more than twice their
promise or took it, and their ratios and gains."""

FEW = 8
"""Samples of which no median is taken."""

WILD = 0.15
"""The share of wild ones among the cornered steps of the median sample, above which the output jumps."""

_EDGES = (STEP * 2 * SCALES[0], STEP * 2 * SCALES[1])  # between the scales, in units of eps
_ALIGNED = 0.15  # least promise of a free step, in units of that of the steepest step of its length
_MOST = 2.0  # ratios are clipped to -_MOST .. _MOST, so that no single step decides a mean

_KEPT = (0.4, 3.0)  # the median share of a promise that steps from a point keep; honest models: 0.55 to 1.7
_NOTHING = 0.25  # of the samples, for which such steps may deliver nothing
_WALL = 1e-5  # a pixel this close to black or white cannot move there
_OUTSIDE = 0.01  # less than minus this share of what the ball is worth is promised outside; rounding is less
_LOST = 1e-6  # promises below this share of the distance to the boundary are lost in rounding

_MOST_POINTS = 200
_ROUNDING = 1e-5  # gains below this share of the values are rounding errors


@dataclass(frozen=True)
class Gains:
    """What steps promised and delivered: tensors of shape (steps, samples); `counts` where both exceed rounding."""

    promised: Tensor
    delivered: Tensor
    counts: Tensor

    @property
    def ratio(self) -> Tensor:
        """Delivered over promised; NaN where the promise is zero or lost in rounding."""
        return torch.where(self.counts, self.delivered / self.promised, torch.nan)


def measure_gains(
    model: nn.Module, z: Tensor, y: Tensor, threat: Threat, lengths: tuple[float, ...], loss: Loss = margin
) -> Gains:
    """The gains of one step of each of the `lengths` from `z`, along the threat's direction of steepest ascent.

    Steps stay in the box [0, 1], but may leave the ball of the threat. It costs one gradient and one forward pass for
    each length.
    """
    z = z.detach()
    with frozen(model):
        with torch.enable_grad():
            start = z.clone().requires_grad_()
            values = loss(model(start), y)
            grad = gradient(values, start)
        before = values.detach().double()
        direction = threat.ascent(grad, z)
        steps = [(z + length * direction).clamp(0, 1) for length in lengths]
        with torch.no_grad():
            after = torch.stack([loss(model(step), y).double() for step in steps])
    promised = torch.stack([promised_gain(grad, z, step) for step in steps])
    return Gains(promised, after - before, _exceeds_rounding(promised, before, after))


def promised_gain(grad: Tensor, z: Tensor, step: Tensor) -> Tensor:
    """<gradient, step - z>, one number per sample, in float64."""
    gain: Tensor = torch.linalg.vecdot(grad.flatten(1), (step - z).flatten(1))
    return gain.double()


def _exceeds_rounding(promised: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Whether a promise is larger than rounding errors: of the values, and of logits of size 1 behind small values."""
    return promised > _ROUNDING * torch.maximum(before.abs(), after.abs()).clamp(min=1)


def kept_promises(model: nn.Module, start: Tensor, y: Tensor, threat: Threat) -> Tensor:
    """The share of the promised gain that a step of each of the `SCALES` delivers: (samples, scales).

    Both are counted up to the boundary: a promise to go far beyond it is kept where the sample is misclassified. Where
    nothing is promised, nothing is delivered; NaN for samples that are misclassified at the start.
    """
    with frozen(model), torch.no_grad():
        distance = -margin(model(start), y).double()
    kept = distance.new_full((len(start), len(SCALES)), torch.nan)
    correct = (distance > 0).nonzero()[:, 0]
    if len(correct):
        lengths = tuple(STEP * scale * threat.eps for scale in SCALES)
        gains = measure_gains(model, start[correct], y[correct], threat, lengths)
        promised, delivered = (torch.minimum(gain, distance[correct]) for gain in (gains.promised, gains.delivered))
        made = promised > _LOST * distance[correct]
        kept[correct] = torch.where(made, delivered / promised, 0.0).T
    return kept


def are_broken(kept: Tensor) -> bool:
    """Whether the promises of some length are broken: (samples, scales) of `kept_promises`, without NaN."""
    middle, nothing = kept.median(0).values.tolist(), (kept <= 0).sum(0).tolist()
    return any(
        not _KEPT[0] <= share <= _KEPT[1] or wilson(count, len(kept))[0] > _NOTHING
        for share, count in zip(middle, nothing, strict=True)
    )


@dataclass
class GainRecorder:
    """Sums over the steps of searches, for each sample; costs no pass and no synchronization.

    A search calls `arrive` after each evaluation and `depart` before it moves on. The axes of `sums` are samples,
    `KINDS`, `SCALES` and `TERMS`. `changes` are the numbers, from 0, of evaluations with another loss than the one
    before: the steps that lead to them do not count.
    """

    threat: Threat
    sums: Tensor
    value: Tensor
    promised: Tensor
    kind: Tensor
    scale: Tensor
    changes: tuple[int, ...] = ()
    evaluations: int = 0

    @classmethod
    def of(cls, threat: Threat, x: Tensor, changes: tuple[int, ...] = ()) -> GainRecorder:
        nothing = torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
        first = torch.zeros_like(nothing, dtype=torch.int64)
        sums = nothing.new_zeros(len(x), len(KINDS), len(SCALES), len(TERMS))
        return cls(threat, sums, nothing, nothing.clone(), first, first.clone(), changes)

    def depart(self, place: Tensor, value: Tensor, grad: Tensor, z: Tensor, step: Tensor) -> None:
        """The samples at `place` go from `z`, with this value and gradient, to `step`."""
        length, promised = self.threat.size(step, z), promised_gain(grad, z, step)
        steepest = length * torch.linalg.vector_norm(grad.flatten(1), ord=dual_order(self.threat), dim=1)
        self.value[place], self.promised[place] = value.double(), promised
        self.kind[place] = (promised < _ALIGNED * steepest).long()
        self.scale[place] = sum((length > edge * self.threat.eps).long() for edge in _EDGES)

    def arrive(self, place: Tensor, value: Tensor) -> None:
        """The samples at `place` have this value where their last step ended."""
        before, promised, after = self.value[place], self.promised[place], value.double()
        delivered, counts = after - before, _exceeds_rounding(promised, before, after)
        ratio = (delivered / promised).clamp(-_MOST, _MOST)
        failed, wild = (delivered <= 0).double(), (ratio.abs() == _MOST).double()
        terms = torch.stack([torch.ones_like(ratio), failed, wild, ratio, promised, delivered], dim=1)
        if self.evaluations not in self.changes:
            self.sums[place, self.kind[place], self.scale[place]] += torch.where(counts[:, None], terms, 0.0)
        self.promised[place] = torch.nan  # no step, until the next departure
        self.evaluations += 1


@dataclass
class Outlook:
    """Which samples of a search have a chance by the linear model at its points; costs no pass.

    The value is negative up to the boundary. A sample has none if it lies further below zero than `patience` times what
    the linear model promises at best inside the ball, by pixels that are not yet black or white. Such a model is
    believed only if the last step gained no more than twice what was promised before it, so not where gradients are
    masked.
    """

    threat: Threat
    patience: float
    value: Tensor
    promised: Tensor

    @classmethod
    def of(cls, threat: Threat, x: Tensor, patience: float) -> Outlook:
        nothing = torch.full((len(x),), torch.nan, dtype=torch.float64, device=x.device)
        return cls(threat, patience, nothing, nothing.clone())

    def has_chance(self, place: Tensor, value: Tensor, grad: Tensor, z: Tensor, x: Tensor) -> Tensor:
        """For the samples at `place` with clean images `x`, whose search is at `z` with this value and gradient."""
        free = torch.where(torch.where(grad > 0, z < 1 - _WALL, z > _WALL), grad, 0.0)
        most = self.threat.eps * torch.linalg.vector_norm(free.flatten(1), ord=dual_order(self.threat), dim=1).double()
        promised = promised_gain(free, z, x) + most
        believed = value - self.value[place] <= _MOST * self.promised[place]  # not at the first point
        inside = promised >= -_OUTSIDE * most  # APGD in L1 starts in larger balls, far from where this one counts
        self.value[place], self.promised[place] = value, promised
        far: Tensor = believed & inside & (-value > self.patience * promised.clamp(min=0))
        return ~(far & (grad != 0).flatten(1).any(1))


def mean_over_steps(sums: Tensor, term: str, kind: str, scales: slice = slice(None)) -> Tensor:
    """Each sample's mean of one of the `TERMS` over its steps of one kind and these scales; NaN where it has none."""
    chosen = sums[:, KINDS.index(kind), scales].sum(1)
    return chosen[:, TERMS.index(term)] / chosen[:, TERMS.index("steps")]


def summarize_gains(sums: Tensor) -> dict[str, Any]:
    """What results record of an attack's steps: for each kind of step its scales, and points for a figure.

    A point is the mean promised and delivered gain of a sample's free steps, in units of the attack's own loss.
    """
    summary: dict[str, Any] = {}
    for kind in KINDS:
        summary[kind] = []
        for place, scale in enumerate(SCALES):
            scales = slice(place, place + 1)
            ratio = mean_over_steps(sums, "ratio", kind, scales)
            known = ~ratio.isnan()
            if bool(known.any()):
                steps = sums[:, KINDS.index(kind), place].sum(0)
                row = {"length": STEP * scale, "samples": int(known.sum()), "steps": int(steps[0])}
                row["median_ratio"] = round(float(ratio[known].median()), 4)
                row |= {name: round(float(steps[TERMS.index(name)] / steps[0]), 4) for name in ("failed", "wild")}
                summary[kind].append(row)
    promised, delivered = (mean_over_steps(sums, name, "free") for name in ("promised", "delivered"))
    known = ~promised.isnan()
    points = torch.stack([promised[known], delivered[known]], dim=1)[:_MOST_POINTS]
    return summary | {"points": [[float(f"{value:.4g}") for value in point] for point in points.tolist()]}
