"""What minimal-norm attacks share: the smallest adversarial points so far, and balls with a radius for each sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled, gradient
from vitadel.attacks.per_sample import per_sample, takes_arrays
from vitadel.attacks.threats import L1, L2, Linf, shift_to_budget
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

TINY = 1e-12
LAST_GAMMA = 0.001
"""The share by which FMN's radii still change in the last steps."""

ORDERS: dict[type, float] = {Linf: math.inf, L2: 2.0, L1: 1.0}


@dataclass
class Nearest:
    """The samples that are still searched, and the smallest adversarial point found of every sample of the batch.

    With `stop` a sample leaves once it has a point inside the budget, else only if its clean image is misclassified.
    """

    threat: Threat
    model: nn.Module
    x: Tensor  # of the samples still searched, as y and place
    y: Tensor
    place: Tensor
    found: Tensor  # of all samples, as size
    size: Tensor
    stop: bool

    @classmethod
    def start(cls, threat: Threat, model: nn.Module, x: Tensor, y: Tensor, stop: bool) -> Nearest:
        size = torch.full((len(x),), torch.inf, device=x.device, dtype=torch.float64)
        return cls(threat, model, x, y, torch.arange(len(x), device=x.device), x.clone(), size, stop)

    @property
    def best(self) -> Tensor:
        """The size of the smallest point of each sample still searched; infinite where there is none."""
        return self.size[self.place]

    def record(self, z: Tensor, logits: Tensor) -> Tensor:
        """Keep the adversarial ones of the points `z` that are smaller than what is known; which are adversarial."""
        wrong = fooled(self.model, z, logits, self.y)
        length = self.threat.size(z, self.x)
        better = wrong & (length < self.best)
        point = torch.where(per_sample(better, z).bool(), z, self.found[self.place])
        self.found.index_copy_(0, self.place, point)
        self.size.index_copy_(0, self.place, torch.where(better, length, self.best))
        return wrong

    def ascend(self, z: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Record the points `z`; returns them, their losses with the gradients, and which are adversarial."""
        with torch.enable_grad():
            logits = self.model(z.requires_grad_())
            values = loss(logits, self.y)
            grad = gradient(values, z).detach()
        z = z.detach()
        return z, values.detach(), grad, self.record(z, logits.detach())

    def rest(self, done: Tensor | None = None) -> Tensor | None:
        """The rows that go on, of those still searched, or None if all do; `done` rows leave as well."""
        leaves = self.best <= (self.threat.eps if self.stop else 0)
        rows = (~(leaves if done is None else leaves | done)).nonzero()[:, 0]  # the one wait for the device in a step
        if len(rows) == len(self.place):
            return None
        self.x, self.y, self.place = self.x[rows], self.y[rows], self.place[rows]
        return rows

    def result(self, x: Tensor) -> Tensor:
        """The smallest points inside the budget; the clean images `x` of the samples that have none."""
        return torch.where(per_sample(self.size <= self.threat.eps, x).bool(), self.found, x)


class SearchesNearest(Protocol):
    """An attack whose `__call__` is `nearest_of`."""

    @property
    def threat(self) -> Threat: ...

    @property
    def stop_when_fooled(self) -> bool: ...

    def search(self, nearest: Nearest) -> None:
        """Record points; the model is frozen, and gradients are off."""
        ...


@takes_arrays
def nearest_of(attack: SearchesNearest, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
    """Run a minimal-norm attack: its smallest points inside the budget, and the clean images where there are none."""
    check_pixels(x)
    x = x.detach()
    if attack.threat.eps == 0:
        return x.clone()
    with frozen(model), torch.no_grad():
        nearest = Nearest.start(attack.threat, model, x, y, attack.stop_when_fooled)
        attack.search(nearest)
    return nearest.result(x)


def check_settings(attack: str, threat: Threat, allowed: tuple[type, ...], **counts: int) -> None:
    """Refuse a threat that the attack is not made for, and counts below one."""
    if type(threat) not in allowed:
        names = " or ".join(kind.__name__ for kind in allowed)
        raise UserError(f"{attack} needs the threat {names}, got {type(threat).__name__}")
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} of {attack} must be at least 1, got {value}")


def length_of(delta: Tensor, order: float) -> Tensor:
    """The norm of each perturbation."""
    length: Tensor = torch.linalg.vector_norm(delta.flatten(1), ord=order, dim=1)
    return length


def project_to_radius(z: Tensor, x: Tensor, radius: Tensor, order: float) -> Tensor:
    """The points of box and balls of these radii, one for each sample, nearest to `z` or no farther from `x`."""
    if order == math.inf:
        reach = per_sample(radius, x)
        return torch.minimum(torch.maximum(z, x - reach), x + reach).clamp(0, 1)
    delta = z - x
    if order == 2:
        length = length_of(delta, 2.0).clamp(min=TINY)
        return (x + delta * per_sample((radius / length).clamp(max=1), x)).clamp(0, 1)
    flat, start = delta.flatten(1), x.flatten(1)
    reach, room = flat.abs(), torch.where(flat > 0, 1 - start, start)
    kept = torch.minimum((reach - shift_to_budget(reach, room, radius)[:, None]).clamp(min=0), room)
    return (start + kept * flat.sign()).view_as(x)


def cosine(turn: int, steps: int, first: float, last: float) -> float:
    """A value that falls from `first` to `last` along half a cosine wave."""
    return last + (first - last) * (1 + math.cos(math.pi * turn / steps)) / 2
