"""FMN: fast minimum-norm attack (Pintor et al. 2021, arXiv:2102.12827)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.attacks.losses import margin
from vitadel.attacks.minimal_norm.fmn_l0 import SparseFMN
from vitadel.attacks.minimal_norm.nearest import (
    LAST_GAMMA,
    ORDERS,
    TINY,
    Nearest,
    check_settings,
    cosine,
    length_of,
    nearest_of,
    project_to_radius,
)
from vitadel.attacks.per_sample import per_sample
from vitadel.attacks.threats import L0, dual_order
from vitadel.errors import UserError
from vitadel.types import Threat

_LENGTHS = {math.inf: 10.0}  # of the first step; 1 in the other norms


@dataclass(frozen=True)
class FMN:
    """The smallest adversarial perturbation found, in Linf, L2 or L1, if it is inside the budget.

    Each step ascends the logit margin and projects to a ball of the sample's own radius. Before the first adversarial
    point the radius reaches beyond the linearized boundary, by the share `gamma`; then it shrinks by `gamma` after an
    adversarial point and grows by it after another one. `length` is the Euclidean length of the first step, by
    default 10 in Linf, where shorter ones stay far from the corners of the ball, else 1. With `stop_when_fooled` a
    sample stops at its first adversarial point inside the budget; otherwise the search for a smaller one continues.
    """

    threat: Threat
    steps: int = 100
    length: float | None = None
    gamma: float = 0.05
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        check_settings("FMN", self.threat, (*ORDERS,), steps=self.steps)

    __call__ = nearest_of

    def search(self, nearest: Nearest) -> None:
        order = ORDERS[type(self.threat)]
        length = _LENGTHS.get(order, 1.0) if self.length is None else self.length
        z, radius = nearest.x.clone(), nearest.x.new_full((len(nearest.x),), torch.inf)
        for turn in range(self.steps):
            z, gap, grad, wrong = nearest.ascend(z, margin)
            rows = nearest.rest()
            if rows is not None:
                z, radius, grad, gap, wrong = z[rows], radius[rows], grad[rows], gap[rows], wrong[rows]
                if len(rows) == 0:
                    return
            gamma = cosine(turn, self.steps, self.gamma, LAST_GAMMA)
            steepness = length_of(grad, dual_order(self.threat)).clamp(min=TINY)
            radius = self._radius(nearest, z, radius, gap.abs() / steepness, wrong, gamma)
            radius = radius.to(z.dtype).clamp(max=self.threat.eps)  # nothing beyond the budget would count
            step = cosine(turn, self.steps, length, length / 100)
            moved = z + grad * per_sample(step / length_of(grad, 2).clamp(min=TINY), grad)
            z = project_to_radius(moved, nearest.x, radius, order)
        nearest.record(z, nearest.model(z))

    def _radius(
        self, nearest: Nearest, z: Tensor, radius: Tensor, missing: Tensor, wrong: Tensor, gamma: float
    ) -> Tensor:
        """The next radii, from what is `missing` to the linearized boundary and whether the point is adversarial."""
        best = nearest.best.to(radius.dtype)
        reaching = self.threat.size(z, nearest.x).to(radius.dtype) + missing
        larger = (1 + gamma) * torch.where(best.isfinite(), radius, reaching)
        return torch.where(wrong, torch.minimum(radius * (1 - gamma), best), larger)

    def passes(self) -> tuple[int, int]:
        return self.steps, 1


def fmn(threat: Threat, steps: int = 100, step: float | None = None, gamma: float = 0.05) -> FMN | SparseFMN:
    """FMN in the norm of the threat; in L0 values move to the walls, so there is no length of a step."""
    if not isinstance(threat, L0):
        return FMN(threat, steps, step, gamma)
    if step is not None:
        raise UserError(f"step of fmn has no meaning in l0, where values move to 0 or 1; leave out step={step:g}")
    return SparseFMN(threat, steps, gamma)
