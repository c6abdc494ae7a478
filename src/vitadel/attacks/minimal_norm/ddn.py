"""DDN: decoupled direction and norm (Rony et al. 2019, arXiv:1811.09600)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.minimal_norm.nearest import TINY, Nearest, check_settings, cosine, length_of
from vitadel.attacks.per_sample import per_sample, takes_arrays
from vitadel.attacks.threats import L2
from vitadel.backbones.classifier import check_pixels
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
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

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        with frozen(model), torch.no_grad():
            nearest = Nearest.start(self.threat, model, x, y, self.stop_when_fooled)
            z, radius = x.clone(), x.new_full((len(x),), min(self.first_norm, self.threat.eps))
            for turn in range(self.steps):
                with torch.enable_grad():
                    logits = model(z.requires_grad_())
                    grad = gradient(cross_entropy(logits, nearest.y), z).detach()
                z = z.detach()
                wrong = nearest.record(z, logits.detach())
                rows = nearest.rest()
                if rows is not None:
                    z, radius, grad, wrong = z[rows], radius[rows], grad[rows], wrong[rows]
                    if len(rows) == 0:
                        return nearest.result(x)
                radius = (radius * torch.where(wrong, 1 - self.gamma, 1 + self.gamma)).clamp(max=self.threat.eps)
                step = cosine(turn, self.steps, self.length, self.length / 100)
                delta = z - nearest.x + grad * per_sample(step / length_of(grad, 2).clamp(min=TINY), grad)
                delta = delta * per_sample(radius / length_of(delta, 2).clamp(min=TINY), delta)
                z = (nearest.x + delta).clamp(0, 1)
            nearest.record(z, model(z))
        return nearest.result(x)

    def passes(self) -> tuple[int, int]:
        return self.steps, 1


def ddn(threat: Threat, steps: int = 100, step: float = 1.0, gamma: float = 0.05, first_norm: float = 1.0) -> DDN:
    return DDN(threat, steps, gamma, first_norm, step)
