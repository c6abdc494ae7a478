"""Encoded images on their way from a file that is read in blocks to samples that are read one by one.

A Parquet file can only be decoded a row group at a time, and a group may hold many megabytes. Each group that is
touched is streamed once into a temporary file, from which any row is one seek away: memory stays flat, however large
the groups are, and shuffled access costs no more than access in order.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import numpy as np
from numpy.typing import NDArray

from vitadel.errors import UserError

__all__ = ["Spool"]


def _temporary() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="vitadel-")  # has no name, so it goes when it is closed, even by a crash


@dataclass(eq=False)
class Spool:
    """`load(group)` streams the rows of a block; `row(group, row)` gives one of them. Thread-safe.

    When `capacity` bytes are on disk, everything is forgotten and filled anew: sets larger than that are best read
    in order.
    """

    load: Callable[[int], Iterable[bytes | None]]
    capacity: int = 16 << 30
    _file: IO[bytes] = field(default_factory=_temporary, init=False, repr=False)
    _places: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)  # (start, size) per row
    _size: int = field(default=0, init=False, repr=False)
    _faults: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self._file.close)

    def row(self, group: int, row: int) -> bytes | None:
        """The bytes of a row; None where the file has none. Rows behind a broken place raise what broke there."""
        with self._lock:
            places = self._places.get(group)
            if places is None:
                places = self._take_in(group)
            if row >= len(places):
                raise OSError(self._faults.get(group, f"the block ends after {len(places)} rows"))
            start, size = places[row].tolist()
            if size < 0:
                return None
            self._file.seek(start)
            return self._file.read(size)

    def _take_in(self, group: int) -> NDArray[np.int64]:
        if self._size >= self.capacity:
            self._places.clear()
            self._size = 0
        self._file.seek(self._size)
        places = []
        position = self._size
        try:
            for content in self.load(group):
                places.append((position, -1 if content is None else len(content)))
                if content is not None:
                    with _room():
                        self._file.write(content)
                    position += len(content)
        except UserError:
            raise
        except Exception as fault:  # remembered, lest every further row decodes the block again only to fail
            self._faults[group] = f"{type(fault).__name__}: {fault}"
        with _room():
            self._file.truncate(position)  # also flushes
        self._size = position
        self._places[group] = np.array(places, dtype=np.int64).reshape(-1, 2)
        return self._places[group]


@contextmanager
def _room() -> Iterator[None]:
    """A full disk is not the sample's fault, so it must not look like one."""
    try:
        yield
    except OSError as fault:
        raise UserError(
            f"a temporary file in '{tempfile.gettempdir()}' cannot be written: {fault}; free some space, or set TMPDIR "
            f"to another folder"
        ) from fault
