"""Several searches on the same samples with one memory: the best point of each, whatever search found it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.threats import L1
from vitadel.types import Aim, Threat

__all__ = ["Memory", "Value", "Watched"]

Value = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(logits, labels, places in the batch, progress) -> what to maximise."""


@dataclass
class Memory:
    """The best that was seen of each sample, over all runs: the largest logit margin, and where."""

    threat: Threat
    x: Tensor
    margin: Tensor
    point: Tensor
    rival: Tensor
    fallen: Tensor

    @classmethod
    def of(cls, threat: Threat, x: Tensor, logits: Tensor, y: Tensor, wrong: Tensor) -> Memory:
        return cls(threat, x, margin(logits, y).double(), x.clone(), _rival(logits, y), wrong.clone())

    def note(self, place: Tensor, z: Tensor, logits: Tensor, y: Tensor, wrong: Tensor) -> None:
        """A fallen sample keeps the point where it fell."""
        if isinstance(self.threat, L1):  # APGD begins in a larger ball there, and what it sees outside does not count
            inside = self.threat.size(z, self.x[place]) <= self.threat.eps
            place, z, logits, y, wrong = place[inside], z[inside], logits[inside], y[inside], wrong[inside]
        new = margin(logits, y).double()
        better = ((new > self.margin[place]) | wrong) & ~self.fallen[place]
        where = place[better]
        self.margin[where], self.point[where] = new[better], z[better]
        self.rival[where] = _rival(logits[better], y[better])
        self.fallen[place[wrong]] = True

    def standing(self) -> Tensor:
        return (~self.fallen).nonzero().squeeze(1)


def _rival(logits: Tensor, y: Tensor) -> Tensor:
    return logits.scatter(1, y[:, None], -torch.inf).argmax(1)


@dataclass(frozen=True)
class _WatchedAim:
    model: nn.Module
    y: Tensor
    place: Tensor
    memory: Memory
    value: Value

    def look(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        wrong = fooled(self.model, z, logits, self.y)
        self.memory.note(self.place, z.detach(), logits.detach(), self.y, wrong)
        return self.value(logits, self.y, self.place, progress), self.memory.fallen[self.place]

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, y=self.y[chosen], place=self.place[chosen])


@dataclass(frozen=True, eq=False)
class Watched:
    """A goal whose every look is remembered; `place` is where its batch lies in the memory."""

    place: Tensor
    memory: Memory
    value: Value

    @property
    def forwards(self) -> int:
        return 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _WatchedAim(model, y, self.place, self.memory, self.value)
