"""FMN in L0 (Pintor et al. 2021, arXiv:2102.12827), with points at the corners of the box."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.attacks.losses import margin
from vitadel.attacks.minimal_norm.nearest import (
    LAST_GAMMA,
    TINY,
    Nearest,
    check_settings,
    cosine,
    length_of,
    nearest_of,
)
from vitadel.attacks.per_sample import per_sample
from vitadel.attacks.threats import L0
from vitadel.types import Threat


@dataclass(frozen=True)
class SparseFMN:
    """The adversarial perturbation of the fewest values found, if the budget has room for them.

    As in FMN each sample has its own radius, here a number of values. Before the first adversarial point it is what
    the linearized boundary needs; then it shrinks by `gamma`, by one at least, after an adversarial point and grows by
    it after another one, and stays below the best known number. Steps of FMN along the gradient are too short in L0 to
    move other values than before, so each step chooses anew: the gradients of the logit margin are averaged, with the
    weight `memory` on the past, and the values that gain most by their way to the box's wall move there. For a linear
    model this is the solution. With `stop_when_fooled` a sample stops at its first adversarial point inside the budget.
    """

    threat: Threat
    steps: int = 100
    gamma: float = 0.05
    memory: float = 0.9
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        check_settings("FMN in L0", self.threat, (L0,), steps=self.steps)

    __call__ = nearest_of

    def search(self, nearest: Nearest) -> None:
        x = nearest.x
        z, radius, average = x.clone(), x.new_zeros(len(x)), torch.zeros_like(x)
        for turn in range(self.steps):
            z, gap, grad, wrong = nearest.ascend(z, margin)
            rows = nearest.rest(nearest.best <= 1)
            if rows is not None:
                z, radius, average = z[rows], radius[rows], average[rows]
                grad, gap, wrong = grad[rows], gap[rows], wrong[rows]
                if len(rows) == 0:
                    return
            gamma = cosine(turn, self.steps, self.gamma, LAST_GAMMA)
            radius = self._radius(nearest, radius, _needed(grad, z, gap), wrong, gamma)
            unit = grad * per_sample(1 / length_of(grad, 2).clamp(min=TINY), grad)
            average = torch.lerp(unit, average, self.memory if turn else 0.0)
            z = _corner(average, nearest.x, radius)
        nearest.record(z, nearest.model(z))

    def _radius(self, nearest: Nearest, radius: Tensor, needed: Tensor, wrong: Tensor, gamma: float) -> Tensor:
        """The next number of values of each sample, inside the budget."""
        best = nearest.best.to(radius.dtype)
        smaller = torch.minimum(radius - 1, (radius * (1 - gamma)).floor())
        larger = torch.maximum(radius + 1, (radius * (1 + gamma)).floor())
        larger = torch.where(best.isfinite(), larger, radius + needed)
        return torch.minimum(torch.where(wrong, smaller, larger), best - 1).clamp(1, self.threat.eps)

    def passes(self) -> tuple[int, int]:
        return self.steps, 1


def _needed(grad: Tensor, z: Tensor, gap: Tensor) -> Tensor:
    """How many values must move to the walls to reach the linearized boundary from `z`."""
    gains = (grad.abs() * torch.where(grad > 0, 1 - z, z)).flatten(1).sort(dim=1, descending=True).values
    return ((gains.cumsum(1) < gap.abs()[:, None]).sum(1) + 1).to(z.dtype)


def _corner(average: Tensor, x: Tensor, radius: Tensor) -> Tensor:
    """`x` with those values at the walls, at most `radius` of each sample, that gain most along `average`."""
    wall = (average > 0).to(x.dtype)
    gains, rank = (average * (wall - x)).flatten(1).sort(dim=1, descending=True, stable=True)
    first = torch.arange(gains.shape[1], device=x.device) < radius[:, None]
    moves = torch.zeros_like(first).scatter(1, rank, first & (gains > 0))
    return torch.where(moves.view_as(x), wall, x)
