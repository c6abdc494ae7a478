"""Reading in worker processes: in order, a few requests ahead, and with a message if one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from vitadel.errors import UserError

Read = TypeVar("Read")
Chunk = tuple[list[int], Tensor] | list[tuple[int, Tensor | Exception]]
"""Indices with one tensor of all images, or each index with its image or the reason why there is none."""

_MOST = 16  # workers of an audit; more than one model keeps busy
_IS_DEAD = "DataLoader worker (pid"  # in torch's error; not in one that a living worker raised
_MOMENTS = 40  # of 0.05 s


class Reader(Protocol):
    """Reads samples by their index."""

    def name(self, index: int) -> str: ...

    def __call__(self, part: Sequence[int]) -> list[tuple[int, Tensor | Exception]]: ...


def usual_workers(processes: int) -> int:
    """Worker processes for a model on a GPU: the cores that this one of all `processes` of a run has for itself."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(_MOST, cores // here - 1))


class Places:
    """Which sample each worker process is at, in memory that the processes share."""

    def __init__(self, workers: int) -> None:
        self.table: Tensor = torch.full((max(1, workers), 2), -1, dtype=torch.int64).share_memory_()
        self.process = 0

    def enter(self, sample: int) -> None:
        """Note that this process reads `sample` now; nothing outside of a worker process."""
        worker = get_worker_info()
        if worker is None:
            return
        if not self.process:  # first in this worker
            self.process = os.getpid()
            self.table[worker.id, 0] = self.process
        self.table[worker.id, 1] = sample

    def of(self, fault: Exception) -> list[int]:
        """The samples that the dead processes were at: those that torch's error names, or that have ended by now."""
        named = re.search(r"pid(?:\(s\))? ([\d, ]+)", str(fault))
        dead = {int(each) for each in named[1].split(",")} if named else self._ended()
        return [sample for process, sample in self.table.tolist() if process in dead and sample >= 0]

    def _ended(self) -> set[int]:
        """A connection may break a moment before its process has ended."""
        for _ in range(_MOMENTS):
            running = {each.pid for each in multiprocessing.active_children()}
            if ended := {process for process, _ in self.table.tolist() if process > 0} - running:
                return ended
            time.sleep(0.05)
        return set()

    def watch(self, loader: DataLoader[Read], name: Callable[[int], str], fewer: str) -> Iterator[Read]:
        """What torch's loader reads; a worker process that dies is a user error that names its sample.

        `fewer` is the advice to use fewer processes.
        """
        here = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGCHLD) if here else None
        read = iter(loader)
        if here:  # torch's handler raises in the middle of whatever runs; without it, the loader itself finds the dead
            signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
        try:
            yield from read
        except (RuntimeError, OSError, EOFError) as fault:
            samples = self.of(fault) if isinstance(fault, (OSError, EOFError)) or _IS_DEAD in str(fault) else []
            if not samples and _IS_DEAD not in str(fault):
                raise
            where = ", ".join(f"sample {each} ({name(each)})" for each in samples) or "an unknown sample"
            reason = (str(fault) or type(fault).__name__).splitlines()[0].rstrip(". ")
            raise UserError(
                f"a worker process that reads images died at {where}: {reason}. If the machine is short of memory, "
                f"{fewer}; if it dies there again, replace or remove that sample."
            ) from fault


def read_in_processes(reader: Reader, chunks: Iterable[Sequence[int]], workers: int) -> Generator[Chunk, None, None]:
    """What the reader reads for each chunk of indices, in order; the processes end with the generator.

    Images that are alike come as one tensor.
    """
    dataset = Chunked(reader, workers)
    loader: DataLoader[Any] = DataLoader(
        cast("Dataset[Any]", dataset),
        batch_sampler=cast("Iterable[list[int]]", ([int(index) for index in chunk] for chunk in chunks)),
        num_workers=workers,
        collate_fn=_as_it_is,
        prefetch_factor=2,
    )
    for part, pixels, faults in dataset.places.watch(loader, reader.name, "use fewer --workers"):
        if not faults and isinstance(pixels, Tensor):
            yield part, pixels
            continue
        good = iter(pixels)
        yield [(index, faults[place] if place in faults else next(good)) for place, index in enumerate(part)]


def _as_it_is(part: Any) -> Any:
    """For torch's loader: the data set makes whole batches itself."""
    return part


class Chunked:
    """The data set of torch's loader: a request is a chunk of indices, read one by one so that the place is known."""

    def __init__(self, reader: Reader, workers: int) -> None:
        self.reader, self.places = reader, Places(workers)

    def __getitems__(self, part: list[int]) -> tuple[list[int], Tensor | list[Tensor], dict[int, Exception]]:
        """The indices, the pixels of those that can be read, in one tensor if they are alike, and the faults."""
        outcomes = []
        for index in part:
            self.places.enter(index)
            outcomes += self.reader([index])
        good = [outcome for _, outcome in outcomes if isinstance(outcome, Tensor)]
        # Not every exception can be sent to another process.
        faults: dict[int, Exception] = {
            place: OSError(str(outcome) or type(outcome).__name__)
            for place, (_, outcome) in enumerate(outcomes)
            if isinstance(outcome, Exception)
        }
        alike = len({(each.dtype, each.shape) for each in good}) == 1
        return part, torch.stack(good) if alike else good, faults
