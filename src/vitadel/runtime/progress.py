"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

RESUMED = "found again"
"""The note about what was finished before a run was resumed; always shown."""
_SECONDS_BETWEEN_LINES = 10.0


class Meter(Protocol):
    def advance(self, count: int, note: str = "") -> None: ...


@dataclass
class _Silent:
    def advance(self, count: int, note: str = "") -> None:
        return None


@dataclass
class _Bar:
    bar: Progress
    task: object

    def advance(self, count: int, note: str = "") -> None:
        self.bar.update(self.task, advance=count, note=note)  # type: ignore[arg-type]


@dataclass
class _Lines:
    title: str
    total: int
    done: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def advance(self, count: int, note: str = "") -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES and self.done < self.total and note != RESUMED:
            return
        self.last = now
        left = (now - self.started) / max(self.done, 1) * (self.total - self.done)
        until = f", {left:.0f} s left" if self.done < self.total else ""
        sys.stderr.write(f"{self.title}: {self.done}/{self.total}{until}{f' ({note})' if note else ''}\n")
        sys.stderr.flush()


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Meter]:
    """A meter for `total` samples; silent in all processes but one, and for Python callers."""
    if not shown or total == 0:
        yield _Silent()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, total)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, bar.add_task(title, total=total, note=""))
