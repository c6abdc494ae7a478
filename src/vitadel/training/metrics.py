"""metrics.jsonl: one line per step and per epoch, none missing and none twice, however often a training is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitadel.runtime.run_folder import append, write_atomically

__all__ = ["Metrics"]


@dataclass
class Metrics:
    """Lines wait in memory for the checkpoint that they belong to; `path` None keeps them from the disk."""

    path: Path | None
    saved: int = 0  # the step of the last checkpoint
    waiting: list[str] = field(default_factory=list)

    def go_on(self, step: int, since: int = 0) -> list[dict[str, float]]:
        """Forget what an earlier life wrote after the checkpoint that this one starts from; the steps `since` then."""
        self.saved = step
        if self.path is None or not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if len(kept) != len(lines):
            write_atomically(self.path, "".join(kept).encode())
        rows: list[dict[str, float]] = [json.loads(line) for line in kept]
        return [row for row in rows if row["step"] > since and "epoch" not in row]

    def add(self, step: int, row: Mapping[str, float]) -> None:
        self.waiting.append(json.dumps({"step": step, **row}) + "\n")

    def save(self, step: int) -> None:
        """To be called before the checkpoint is written: a line too many can be taken back, one too few not."""
        if self.path is not None:
            append(self.path, "".join(self.waiting))
        self.waiting.clear()
        self.saved = step
