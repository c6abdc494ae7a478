"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from vitadel.quantities import duration

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
class Pace:
    """The time that is left: at first from the time `expected` for everything, later from what was done since then."""

    total: int
    expected: float | None = None
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def advance(self, count: int, note: str) -> None:
        if note == RESUMED:  # took no time now
            if self.expected is not None:
                self.expected *= 1 - count / self.total
            self.total -= count
        else:
            self.done += count

    def seconds_left(self, now: float | None = None) -> float | None:
        """None if nothing is known, or everything takes longer than expected."""
        spent = (time.monotonic() if now is None else now) - self.started
        share = self.done / self.total if self.total else 1.0
        if share == 0:
            whole = self.expected
        else:
            trust = 1.0 if self.expected is None else min(1.0, 4 * share)
            whole = trust * spent / share + (1 - trust) * (self.expected or 0.0)
        return None if whole is None or (share < 1 and whole <= spent) else whole - spent


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f"{duration(seconds)} left"


class _LeftColumn(ProgressColumn):
    """Rich asks for it at every refresh, so that it counts down while one batch takes minutes."""

    def render(self, task: Task) -> Text:
        pace: Pace = task.fields["pace"]
        return Text("" if task.finished else _left(pace.seconds_left()))


@dataclass
class _Bar:
    bar: Progress
    task: object
    pace: Pace

    def advance(self, count: int, note: str = "") -> None:
        self.pace.advance(count, note)
        self.bar.update(self.task, advance=count, note=note)  # type: ignore[arg-type]


@dataclass
class _Lines:
    title: str
    total: int
    pace: Pace
    done: int = 0
    last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.pace.expected is not None and self.pace.expected > _SECONDS_BETWEEN_LINES:
            self._write("")

    def advance(self, count: int, note: str = "") -> None:
        self.done += count
        self.pace.advance(count, note)
        now = time.monotonic()
        if now - self.last < _SECONDS_BETWEEN_LINES and self.done < self.total and note != RESUMED:
            return
        self.last = now
        self._write(note)

    def _write(self, note: str) -> None:
        left = _left(self.pace.seconds_left()) if self.done < self.total else ""
        until = f", {left}" if left else ""
        sys.stderr.write(f"{self.title}: {self.done}/{self.total}{until}{f' ({note})' if note else ''}\n")
        sys.stderr.flush()


@contextmanager
def progress(title: str, total: int, shown: bool = True, expected: float | None = None) -> Iterator[Meter]:
    """A meter for `total` samples, for which a trial `expected` so many seconds.

    Silent in all processes but one, and for Python callers.
    """
    if not shown or total == 0:
        yield _Silent()
        return
    console, pace = Console(stderr=True), Pace(total, expected)
    if not console.is_terminal:
        yield _Lines(title, total, pace)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        _LeftColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, bar.add_task(title, total=total, note="", pace=pace), pace)
