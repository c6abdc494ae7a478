"""Shards: the parts I/N of one run, computed by jobs of a cluster that need not start together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitadel.errors import UserError
from vitadel.runtime.run_folder import SHARDS


@dataclass(frozen=True, order=True)
class Shard:
    """Part `number` of `count`; numbers begin at 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def folder(self, run: Path) -> Path:
        """Where this shard of a run writes."""
        return run / SHARDS / f"{self.number}-of-{self.count}"

    def has(self, place: int) -> bool:
        """Whether the piece of work at this place, from 0, belongs to this shard."""
        return place % self.count == self.number - 1


def read_shard(text: str) -> Shard:
    """'2/5' as part 2 of 5."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
    shard = Shard(int(found[1]), int(found[2])) if found else Shard(0, 0)
    if not 1 <= shard.number <= shard.count:
        raise UserError(f"--shard takes a part and the number of parts, from 1/N to N/N; got {text!r}")
    return shard


def shards_in(run: Path) -> dict[Shard, Path]:
    """The shards of a run folder, in order."""
    folders = {}
    for path in (run / SHARDS).glob("*-of-*"):
        if found := re.fullmatch(r"(\d{1,6})-of-(\d{1,6})", path.name):
            folders[Shard(int(found[1]), int(found[2]))] = path
    return dict(sorted(folders.items()))


def number_list(numbers: list[int]) -> str:
    """'2, 5 to 9' for 2, 5, 6, 7, 8, 9."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{', ' if len(run) == 2 else ' to '}{run[-1]}" for run in runs
    )


def without_flags(words: Sequence[str], *flags: str) -> list[str]:
    """The words without these flags, their values, and --resume and --json, which a part has no use for."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        elif word not in ("--resume", "--json") and not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
    return kept
