"""The best point of each sample over several searches: a shared memory, and the goal that fills it.

It also remembers, for each search, the largest margin at half of its steps and at its end (`Progress`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled as is_fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.per_sample import keep_samples
from vitadel.attacks.threats import L1
from vitadel.types import Aim, Threat

Value = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(logits, labels, places in the batch, progress) -> the value to maximize."""


@dataclass(frozen=True)
class Progress:
    """The largest margin of each sample in one search: within half of its steps, and within all."""

    half: Tensor
    end: Tensor

    @classmethod
    def of(cls, margin: Tensor) -> Progress:
        return cls(*(torch.full_like(margin, -torch.inf) for _ in range(2)))

    def record(self, place: Tensor, margin: Tensor, progress: float) -> None:
        for best in (self.half, self.end) if progress <= 0.5 else (self.end,):
            best[place] = torch.maximum(best[place], margin)


@dataclass
class BestPoints:
    """For each sample the point with the largest logit margin over all searches, and whether it was fooled."""

    threat: Threat
    x: Tensor
    margin: Tensor
    point: Tensor
    rival: Tensor
    fooled: Tensor
    searches: list[Progress] = field(default_factory=list)

    @classmethod
    def of(cls, threat: Threat, x: Tensor, logits: Tensor, y: Tensor, wrong: Tensor) -> BestPoints:
        return cls(threat, x, margin(logits, y).double(), x.clone(), _rival(logits, y), wrong.clone())

    def start_search(self) -> None:
        self.searches.append(Progress.of(self.margin))

    def record(self, place: Tensor, z: Tensor, logits: Tensor, y: Tensor, wrong: Tensor, progress: float) -> None:
        """Record new points; a fooled sample keeps the first point that fooled the model."""
        if isinstance(self.threat, L1):  # APGD starts in a larger ball there; points outside the real one do not count
            inside = self.threat.size(z, self.x[place]) <= self.threat.eps
            place, z, logits, y, wrong = place[inside], z[inside], logits[inside], y[inside], wrong[inside]
        new = margin(logits, y).double()
        self.searches[-1].record(place, new, progress)
        better = ((new > self.margin[place]) | wrong) & ~self.fooled[place]
        where = place[better]
        self.margin[where], self.point[where] = new[better], z[better]
        self.rival[where] = _rival(logits[better], y[better])
        self.fooled[place[wrong]] = True

    def not_fooled(self) -> Tensor:
        """The places of the samples that are not fooled yet."""
        return (~self.fooled).nonzero().squeeze(1)


def _rival(logits: Tensor, y: Tensor) -> Tensor:
    return logits.scatter(1, y[:, None], -torch.inf).argmax(1)


@dataclass(frozen=True)
class _RecordingAim:
    model: nn.Module
    y: Tensor
    place: Tensor
    best: BestPoints
    value: Value

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        wrong = is_fooled(self.model, z, logits, self.y)
        self.best.record(self.place, z.detach(), logits.detach(), self.y, wrong, progress)
        return self.value(logits, self.y, self.place, progress), self.best.fooled[self.place]


@dataclass(frozen=True, eq=False)
class RecordBest:
    """Maximize `value` and record every evaluated point; `place` are the places of the batch in `best`."""

    place: Tensor
    best: BestPoints
    value: Value

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _RecordingAim(model, y, self.place, self.best, self.value)
