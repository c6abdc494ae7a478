"""The images of the next step, on their way to the device while it computes this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from vitadel.training.data_stream import MicroBatch

_Step = list[MicroBatch]


@dataclass
class StepsAhead:
    """The steps of a stream, of which `fetch` reads the next one and starts its copies to the device.

    A step that is not fetched is read when it is asked for, as all are on a CPU, where reading ahead saves no time.
    What goes wrong in reading is raised when the step is asked for: the one before it can still be finished.
    """

    steps: Iterator[_Step]
    device: torch.device
    fetched: list[_Step | Exception] = field(default_factory=list)

    def fetch(self) -> None:
        if self.device.type == "cpu" or self.fetched:
            return
        step: _Step | Exception
        try:
            step = [part.sent(self.device) for part in next(self.steps, [])]
        except Exception as fault:
            step = fault
        self.fetched.append(step)

    def __iter__(self) -> Iterator[_Step]:
        while step := self.fetched.pop() if self.fetched else next(self.steps, []):
            if isinstance(step, Exception):
                raise step
            yield step
