"""A cache on disk for encoded images that are stored in blocks and read one by one.

A Parquet file can only be decoded one row group at a time, and a group may hold many megabytes. Each group is streamed
once into a temporary file, from which any row is one seek away: memory stays flat for groups of any size, and shuffled
access costs no more than sequential access.
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


def _temporary() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="vitadel-")  # without a name: it vanishes when closed, even by a crash


@dataclass(eq=False)
class RowGroupCache:
    """`load(group)` streams the rows of a group; `row(group, row)` returns one of them. Thread-safe.

    When `capacity` bytes are on disk, the cache is emptied: read larger sets in order.
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
        """The bytes of a row, None if the cell is empty. Rows after a damaged place raise the error found there."""
        with self._lock:
            places = self._places.get(group)
            if places is None:
                places = self._load_group(group)
            if row >= len(places):
                raise OSError(self._faults.get(group, f"the block ends after {len(places)} rows"))
            start, size = places[row].tolist()
            if size < 0:
                return None
            self._file.seek(start)
            return self._file.read(size)

    def _load_group(self, group: int) -> NDArray[np.int64]:
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
                    with _writing():
                        self._file.write(content)
                    position += len(content)
        except UserError:
            raise
        except Exception as fault:  # kept, so that further rows do not decode the group again only to fail
            self._faults[group] = f"{type(fault).__name__}: {fault}"
        with _writing():
            self._file.truncate(position)  # also flushes
        self._size = position
        self._places[group] = np.array(places, dtype=np.int64).reshape(-1, 2)
        return self._places[group]


@contextmanager
def _writing() -> Iterator[None]:
    """A full disk is a user error, not a bad sample."""
    try:
        yield
    except OSError as fault:
        raise UserError(
            f"a temporary file in '{tempfile.gettempdir()}' cannot be written: {fault}; free some space, or set TMPDIR "
            f"to another folder"
        ) from fault
