"""Plug-ins of a user's own, given to recipes by their dotted paths."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Stops:
    at_step: int

    def after_step(self, run):
        if run.step == self.at_step:
            run.stop("enough")


@dataclass
class ControlC:
    """Ctrl-C in one process only, if the environment asks for it."""

    at_step: int
    rank: int

    def after_step(self, run):
        if os.environ.get("CONTROL_C") and (run.step, run.processes.rank) == (self.at_step, self.rank):
            os.kill(os.getpid(), signal.SIGINT)


@dataclass
class Killed:
    """One process is killed at a step, unless the file says that this has happened."""

    at_step: int
    rank: int
    file: str

    def after_step(self, run):
        if (run.step, run.processes.rank) == (self.at_step, self.rank) and not Path(self.file).exists():
            Path(self.file).touch()
            os.kill(os.getpid(), signal.SIGKILL)
