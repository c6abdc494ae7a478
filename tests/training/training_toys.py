"""A training that is not one: what plug-ins ask of a run, with answers that the test chose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitadel.attacks.threats import Linf
from vitadel.runtime.distributed import Processes
from vitadel.types import Threat

__all__ = ["FakeTraining"]


@dataclass
class FakeTraining:
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    threat: Threat = field(default_factory=lambda: Linf(8 / 255))
    processes: Processes = field(default_factory=lambda: Processes(0, 1, torch.device("cpu")))
    seed: int = 0
    epochs: int = 20
    epoch: int = 0
    step: int = 0
    steps_per_epoch: int = 10
    logged: dict[str, float] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)
    stopped: str = ""
    back_to: int | None = None
    asked: list[int] = field(default_factory=list)

    def training_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        self.asked.append(count)
        return self.batches

    held_out_images = training_images

    def log(self, values: Mapping[str, float]) -> None:
        self.logged.update(values)

    def report(self, message: str) -> None:
        self.reported.append(message)

    def stop(self, reason: str, back_to: int | None = None) -> None:
        self.stopped, self.back_to = reason, back_to
