"""DDN: decoupled direction and norm (Rony et al. 2019, arXiv:1811.09600)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.minimal_norm.nearest import TINY, Nearest, check_settings, cosine, length_of, nearest_of
from vitadel.attacks.per_sample import per_sample
from vitadel.attacks.threats import L2
from vitadel.types import Threat


@dataclass(frozen=True)
class DDN:
    """The smallest adversarial perturbation found in L2, if it is inside the budget; else the clean image.

    Each step follows the gradient of the cross-entropy, then sets the length of the perturbation: shorter by the share
    `gamma` after an adversarial point, longer by it after another one. Lengths begin at `first_norm` and never exceed
    the budget; steps begin at `length` and fall to a hundredth of it. With `stop_when_fooled` a sample stops at its
    first adversarial point inside the budget; otherwise the search for a smaller one continues.
    """

    threat: Threat
    steps: int = 100
    gamma: float = 0.05
    first_norm: float = 1.0
    length: float = 1.0
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        check_settings("DDN", self.threat, (L2,), steps=self.steps)

    __call__ = nearest_of

    def search(self, nearest: Nearest) -> None:
        z, radius = nearest.x.clone(), nearest.x.new_full((len(nearest.x),), min(self.first_norm, self.threat.eps))
        for turn in range(self.steps):
            z, _, grad, wrong = nearest.ascend(z, cross_entropy)
            rows = nearest.rest()
            if rows is not None:
                z, radius, grad, wrong = z[rows], radius[rows], grad[rows], wrong[rows]
                if len(rows) == 0:
                    return
            radius = (radius * torch.where(wrong, 1 - self.gamma, 1 + self.gamma)).clamp(max=self.threat.eps)
            step = cosine(turn, self.steps, self.length, self.length / 100)
            delta = z - nearest.x + grad * per_sample(step / length_of(grad, 2).clamp(min=TINY), grad)
            delta = delta * per_sample(radius / length_of(delta, 2).clamp(min=TINY), delta)
            z = (nearest.x + delta).clamp(0, 1)
        nearest.record(z, nearest.model(z))

    def passes(self) -> tuple[int, int]:
        return self.steps, 1


def ddn(threat: Threat, steps: int = 100, step: float = 1.0, gamma: float = 0.05, first_norm: float = 1.0) -> DDN:
    return DDN(threat, steps, gamma, first_norm, step)
