"""Records of finished batches, one per batch and stage, in memory or in a run folder."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vitadel.runtime.run_folder import RunFolder, write_atomically

__all__ = ["BatchCache", "BatchRecord", "FolderCache", "MemoryCache"]

BatchRecord = dict[str, np.ndarray]


class BatchCache(Protocol):
    def find(self, stage: str, number: int) -> BatchRecord | None: ...

    def save(self, stage: str, number: int, record: BatchRecord) -> None: ...


@dataclass(frozen=True)
class MemoryCache:
    """For Python callers without a run folder."""

    records: dict[tuple[str, int], BatchRecord] = field(default_factory=dict)

    def find(self, stage: str, number: int) -> BatchRecord | None:
        return self.records.get((stage, number))

    def save(self, stage: str, number: int, record: BatchRecord) -> None:
        self.records[stage, number] = record


@dataclass(frozen=True)
class FolderCache:
    """Files in a run folder, which survive kill -9 and are seen by the other processes."""

    folder: RunFolder

    def find(self, stage: str, number: int) -> BatchRecord | None:
        try:
            # From an open file, because numpy does not close one that turns out to be damaged.
            with self.folder.batch_file(stage, number).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None  # a missing or damaged record is computed again

    def save(self, stage: str, number: int, record: BatchRecord) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **record)  # type: ignore[arg-type]
        write_atomically(self.folder.batch_file(stage, number), buffer.getvalue())
