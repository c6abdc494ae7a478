"""Searches for attention factors (Jain & Dutta, CVPR 2024): ascent, coordinate grid, both, and as printed.

Where the softmax is saturated, nothing that is computed from the model has a slope with respect to the factor, and an
ascent stays where it starts. So the grid starts at factors that bring the measured gaps of the scores to where the
softmax has a slope, and compares values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.gaps import score_gaps, softening
from vitadel.attacks.attention_scaling.objectives import (
    DEPLOYED,
    OBJECTIVES,
    BoundObjective,
    Passes,
    Probe,
    bind,
    value_cost,
)
from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError, check_known
from vitadel.runtime.rng import SampleRNG

SMALLEST, LARGEST = 1e-7, 1.0
METHODS = ("ascent", "grid", "both")
_SHARES = (0.9, 0.5)  # of the rows of an attention whose gap a start softens
_GRID = (0.1, 10**-0.5, 10**0.5, 10.0)  # tried in turn on every attention, as multiples of its start
_RANGE = 10.0  # how far below its start a factor may go: beyond, attention is all but uniform

Calibration = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Candidate:
    """Factors, the value of the objective, and what a short PGD through them does to the deployed model.

    `loss` is the mean cross-entropy of the deployed model, `broken` the number of images that it misclassifies.
    """

    name: str
    factors: tuple[float, ...]
    value: float | None = None
    loss: float | None = None
    broken: int | None = None


@dataclass(frozen=True)
class FactorSearch:
    """How factors are searched.

    `ascent`: from one random start, `steps` on each batch, each of `pace` decades along the normalized gradient.
    `grid`: from the measured gaps, one attention after another, by values. `both`: the grid, then the ascent from
    there. Factors lie between `smallest` and 1; those of the grid at most a decade below their start.
    """

    method: str = "both"
    objective: str = "lpips"
    steps: int = 10
    pace: float = 0.3
    smallest: float = SMALLEST

    def __post_init__(self) -> None:
        check_known("search", self.method, METHODS)
        check_known("objective", self.objective, OBJECTIVES)
        if self.method == "ascent" and self.objective in DEPLOYED:
            raise UserError(
                f"{self.objective} has no slope with respect to the factors, so there is nothing to ascend; take "
                "search=grid, or one of " + ", ".join(name for name in OBJECTIVES if name not in DEPLOYED)
            )

    @property
    def ascends(self) -> bool:
        return self.method != "grid" and self.objective not in DEPLOYED

    @property
    def most_candidates(self) -> int:
        return 1 if self.method == "ascent" else 2 + self.ascends

    def cost(self, attentions: int) -> tuple[int, int]:
        """The most (gradients, forwards) that one image can cost."""
        gradients, forwards = (self.steps if self.ascends else 0), 3  # gaps, reference, and the guide of GAMA
        if self.method != "ascent":
            values = 1 + len(_SHARES) + len(_GRID) * attentions
            more = value_cost(self.objective)
            gradients, forwards = gradients + values * more[0], forwards + values * more[1]
        return gradients, forwards

    def find(
        self,
        model: nn.Module,
        batches: Calibration,
        rng: SampleRNG,
        passes: Passes,
        reference: float | Sequence[float] = 1.0,
        probe: Probe | None = None,
        gaps: Sequence[Tensor] | None = None,
    ) -> list[Candidate]:
        """The best factors first, then those that the search passed on its way. The model must be frozen.

        The grid looks at the first batch, the ascent at all of them. `gaps` are those of the first batch, where they
        are known.
        """
        bottom = torch.full((len(attentions_of(model)),), math.log10(self.smallest), dtype=torch.float64)

        def ascend(start: Tensor, low: Tensor) -> tuple[float, ...]:
            each = (bind(self.objective, model, x, y, passes, reference) for x, y in batches)
            return self._ascend(each, start, low)

        if self.method == "ascent":
            drawn = (-2 * rng.uniform(len(bottom))[0].double()).maximum(bottom)
            return [Candidate("ascent", ascend(drawn, bottom))]
        x, y = next(iter(batches))
        first = bind(self.objective, model, x, y, passes, reference, probe)
        if gaps is None:
            passes.add(len(x), 0, 1)
            gaps = score_gaps(model, x)
        starts = [Candidate("gaps", self._bounded(softening(gaps, share))) for share in _SHARES]
        start = _ranked(_valued(each, first) for each in dict.fromkeys(starts))[0]
        low = (torch.tensor(start.factors, dtype=torch.float64) / _RANGE).log10().maximum(bottom)
        grid = _coordinate_search(first, start, low)
        found = [grid, start] if grid.factors != start.factors else [start]
        if self.ascends:
            factors = ascend(torch.tensor(grid.factors, dtype=torch.float64).log10(), low)
            found.append(_valued(Candidate("grid + ascent", factors), first))
        return _ranked(found)

    def _bounded(self, factors: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(self.smallest, factor) for factor in factors)

    def _ascend(self, batches: Iterable[BoundObjective], start: Tensor, low: Tensor) -> tuple[float, ...]:
        decades, high = start, torch.zeros_like(start)
        for bound in batches:
            for _ in range(self.steps):
                slope = bound.slope(decades)
                step = self.pace * slope / slope.abs().max().clamp(min=1e-30)
                decades = (decades + step).clamp(low, high)
        return tuple((10**decades).tolist())


def _valued(candidate: Candidate, bound: BoundObjective) -> Candidate:
    return replace(candidate, value=bound.value(candidate.factors))


def _ranked(candidates: Iterable[Candidate]) -> list[Candidate]:
    """By value; of equal ones the first."""
    return sorted(candidates, key=lambda candidate: -(candidate.value or 0.0))


def _coordinate_search(bound: BoundObjective, start: Candidate, low: Tensor) -> Candidate:
    """Go through the attentions once and give each the factor of the grid with the largest value."""
    best = replace(start, name="grid")
    for place, bottom in enumerate((10**low).tolist()):
        own = start.factors[place]
        grid = dict.fromkeys(min(LARGEST, max(bottom, multiple * own)) for multiple in _GRID)
        for factor in grid:
            factors = (*best.factors[:place], factor, *best.factors[place + 1 :])
            if factors != best.factors and (other := bound.value(factors)) > (best.value or 0.0):
                best = Candidate("grid", factors, other)
    return best


def search_factors(
    model: nn.Module,
    calibration: Calibration,
    rng: SampleRNG,
    search: FactorSearch,
    reference: float | Sequence[float] = 1.0,
) -> tuple[float, ...]:
    """The best factors of a search that needs no probe."""
    return search.find(model, calibration, rng, Passes(), reference)[0].factors


def random_factors(model: nn.Module, rng: SampleRNG, smallest: float) -> tuple[float, ...]:
    """Log-uniform between `smallest` and 1, one per attention: a control for every search."""
    drawn = rng.stream("random factors").uniform(len(attentions_of(model)))[0].double()
    return tuple((smallest**drawn).tolist())


def search_factors_as_printed(
    model: nn.Module,
    calibration: Calibration,
    rng: SampleRNG,
    steps: int,
    start: float | Sequence[float] = 1.0,
    smallest: float = SMALLEST,
    passes: Passes | None = None,
) -> tuple[float, ...]:
    """The paper's algorithm 1 as printed.

    Additive normal noise on every batch, raw gradients of equation 3, and the factors so far as reference.
    """
    factors = torch.ones(len(attentions_of(model)), dtype=torch.float64) * torch.tensor(start, dtype=torch.float64)
    for number, (x, y) in enumerate(calibration):
        bound = bind("eq3", model, x, y, passes or Passes(), tuple(factors.tolist()))
        delta = rng.stream("noise", number).normal(len(factors))[0].double()
        for _ in range(steps):
            here = (factors + delta).clamp(smallest, LARGEST)
            delta = delta + bound.slope(here, as_decades=False)
        factors = (factors + delta).clamp(smallest, LARGEST)
    return tuple(factors.tolist())
