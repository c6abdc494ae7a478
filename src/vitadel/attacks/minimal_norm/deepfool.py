"""DeepFool (Moosavi-Dezfooli et al. 2016, arXiv:1511.04599) and SuperDeepFool (arXiv:2303.12481)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.fab import nearest_boundary, to_hyperplane
from vitadel.attacks.losses import check_classes, likeliest_wrong
from vitadel.attacks.minimal_norm.nearest import ORDERS, TINY, Nearest, check_settings, nearest_of
from vitadel.attacks.per_sample import per_sample
from vitadel.attacks.threats import L1, L2, Linf, dual_order
from vitadel.errors import UserError
from vitadel.types import Threat

_ASSUMED_CLASSES = 10  # of `passes`, which does not know the model


@dataclass(frozen=True)
class DeepFool:
    """Steps to the nearest linearized boundary until the model is fooled, if that is inside the budget.

    The boundaries with the `candidates` most likely wrong classes of the clean image are compared at every step; the
    move to the nearest one stays inside the box, and goes beyond the boundary by the share `overshoot`. With
    `returns`, SuperDeepFool: an adversarial perturbation is projected onto the gradient at its end, where the boundary
    is orthogonal to the shortest way, and the steps continue from there until the projection is adversarial itself.
    The last `line_steps` passes then bisect the way from the clean image.
    """

    threat: Threat
    steps: int = 50
    candidates: int = 9
    overshoot: float = 0.02
    returns: bool = False
    line_steps: int = 0
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        allowed = (L2,) if self.returns else (Linf, L2, L1)
        check_settings(
            "SuperDeepFool" if self.returns else "DeepFool",
            self.threat,
            allowed,
            steps=self.steps,
            candidates=self.candidates,
        )
        if not 0 <= self.overshoot <= 1:
            raise UserError(f"overshoot of DeepFool must be from 0 to 1, got {self.overshoot:g}; the paper has 0.02")

    __call__ = nearest_of

    def search(self, nearest: Nearest) -> None:
        model, x, y = nearest.model, nearest.x, nearest.y
        logits = model(x)
        check_classes(logits)
        classes = likeliest_wrong(logits, y)[:, : self.candidates]
        z, before = x, torch.zeros(len(x), dtype=torch.bool, device=x.device)  # adversarial in the step before
        for _ in range(self.steps):
            gap, slope, logits = nearest_boundary(model, z, nearest.y, classes, dual_order(self.threat))
            wrong = nearest.record(z, logits)
            rows = nearest.rest(wrong & before if self.returns else wrong)
            before = wrong
            if rows is not None:
                z, classes, gap, slope, before = z[rows], classes[rows], gap[rows], slope[rows], before[rows]
                if len(rows) == 0:
                    break
            z = self._moved(z, nearest.x, gap, slope, before)
        else:
            nearest.record(z, model(z))
        if self.line_steps:
            self._shorten(model, x, y, nearest)

    def _moved(self, z: Tensor, x: Tensor, gap: Tensor, slope: Tensor, wrong: Tensor) -> Tensor:
        """Beyond the linearized boundary; adversarial points go to their projection onto the ray along `slope`."""
        toward = to_hyperplane(z.flatten(1)[None], slope, gap[None], ORDERS[type(self.threat)])[0].view_as(z)
        moved = z + (1 + self.overshoot) * toward
        if self.returns:
            along = (z - x).flatten(1).mul(slope).sum(1) / slope.square().sum(1).clamp(min=TINY)
            moved = torch.where(per_sample(wrong, z).bool(), x + (along[:, None] * slope).view_as(x), moved)
        return moved.clamp(0, 1)

    def _shorten(self, model: nn.Module, x: Tensor, y: Tensor, nearest: Nearest) -> None:
        """Bisect between the clean images and the points that were found, as far as they are no clean images."""
        rows = (nearest.size.isfinite() & (nearest.size > 0)).nonzero()[:, 0]
        if len(rows) == 0:
            return
        nearest.x, nearest.y, nearest.place = x[rows], y[rows], rows
        way = nearest.found[rows] - nearest.x
        low, high = (way.new_full((len(rows),), share) for share in (0.0, 1.0))
        for _ in range(self.line_steps):
            middle = (low + high) / 2
            z = nearest.x + way * per_sample(middle, way)
            wrong = nearest.record(z, model(z))
            low, high = torch.where(wrong, low, middle), torch.where(wrong, middle, high)

    def passes(self) -> tuple[int, int]:
        return self.steps * min(self.candidates, _ASSUMED_CLASSES - 1), 2 + self.line_steps


def deepfool(threat: Threat, steps: int = 50, candidates: int = 9, overshoot: float = 0.02) -> DeepFool:
    return DeepFool(threat, steps, candidates, overshoot)


def superdeepfool(
    threat: Threat, steps: int = 50, candidates: int = 9, overshoot: float = 0.02, line_steps: int = 8
) -> DeepFool:
    return DeepFool(threat, steps, candidates, overshoot, True, line_steps)
