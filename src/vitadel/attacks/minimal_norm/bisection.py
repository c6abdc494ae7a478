"""Bisection over budgets: the smallest one at which a search that starts from the point found before still succeeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.attacks.losses import margin
from vitadel.attacks.minimal_norm.fmn import FMN
from vitadel.attacks.minimal_norm.nearest import ORDERS, Nearest, check_settings, cosine, nearest_of, project_to_radius
from vitadel.attacks.per_sample import per_sample
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.types import Threat

_SHRINK = 0.8  # no radius is tried that is smaller than the mean of 1 and this share of what is known
_STEPS = (0.25, 0.02)  # first and last length of a round's steps, in units of the radius


@dataclass(frozen=True)
class Bisection:
    """The smallest adversarial perturbation found in Linf, L2 or L1, if it is inside the budget.

    FMN finds a point with half of the `steps`. Then `rounds` share the rest: each projects the smallest point so far
    into a smaller ball and ascends the logit margin there. A success halves the way down from the new point; a round
    without one raises the lower end of the bracket and goes back to the point. With `stop_when_fooled` a sample stops
    at its first adversarial point inside the budget.
    """

    threat: Threat
    steps: int = 100
    rounds: int = 5
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        check_settings("bisection", self.threat, (Linf, L2, L1), steps=self.steps, rounds=self.rounds)

    __call__ = nearest_of

    def search(self, nearest: Nearest) -> None:
        fmn = FMN(self.threat, self._first, stop_when_fooled=self.stop_when_fooled)
        first = fmn(nearest.model, nearest.x, nearest.y)
        nearest.record(first, nearest.model(first))
        nearest.rest()
        lower = torch.zeros_like(nearest.best)
        for _ in range(self.rounds):
            if len(nearest.place) == 0:
                break
            lower = self._round(nearest, lower)

    @property
    def _first(self) -> int:
        """The steps of FMN: half of all, and what the rounds cannot share evenly."""
        return self.steps - self.rounds * self._each

    @property
    def _each(self) -> int:
        return self.steps // 2 // self.rounds

    def _round(self, nearest: Nearest, lower: Tensor) -> Tensor:
        """Search at smaller and smaller radii from the smallest points; the next lower ends of the brackets."""
        radius = self._radius(nearest, lower)
        z = self._inside(nearest.found[nearest.place], nearest.x, radius)
        for turn in range(self._each):
            z, _, grad, wrong = nearest.ascend(z, margin)
            radius = torch.where(wrong, self._radius(nearest, lower), radius)
            rows = nearest.rest()
            if rows is not None:
                z, grad, radius, lower = z[rows], grad[rows], radius[rows], lower[rows]
                if len(rows) == 0:
                    return lower
            length = radius * cosine(turn, self._each, *_STEPS)
            moved = z + per_sample(length.to(z.dtype), z) * self.threat.ascent(grad, z)
            z = self._inside(moved, nearest.x, radius)
        wrong = nearest.record(z, nearest.model(z))
        lower = torch.where(wrong, lower, radius)
        rows = nearest.rest()
        return lower if rows is None else lower[rows]

    def _radius(self, nearest: Nearest, lower: Tensor) -> Tensor:
        """Half way from the smallest point to the lower end; the whole budget where nothing is found yet."""
        best = nearest.best
        return torch.where(best.isfinite(), (torch.maximum(lower, _SHRINK * best) + best) / 2, self.threat.eps)

    def _inside(self, z: Tensor, x: Tensor, radius: Tensor) -> Tensor:
        return project_to_radius(z, x, radius.to(x.dtype), ORDERS[type(self.threat)])

    def passes(self) -> tuple[int, int]:
        return self.steps, 2 + self.rounds


def bisect(threat: Threat, steps: int = 100, rounds: int = 5) -> Bisection:
    return Bisection(threat, steps, rounds)
