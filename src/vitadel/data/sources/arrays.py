"""Rows of a large array, read from disk one by one.

Arrays are not memory-mapped: mapped pages count as memory of the process, so that the peak would grow with the number
of images. A seek and a read give the same rows without that.
"""

from __future__ import annotations

import math
import os
import struct
import tempfile
import tokenize
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from vitadel.data.images import from_array, read_each
from vitadel.errors import UserError

_PIECE = 1 << 18
_HEADER_ERRORS = (
    SyntaxError,
    tokenize.TokenError,
    TypeError,
    OverflowError,
    MemoryError,
    EOFError,
    NotImplementedError,
)  # malformed headers
_LARGEST_ARRAY = 1 << 46  # bytes


@dataclass(frozen=True, eq=False)
class ArrayRows:
    """An array in C order that begins at `offset` of a file; row i is its i-th entry along the first axis."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    keep: object = None  # owner of a temporary file

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, indices: Sequence[int]) -> list[NDArray[np.generic] | Exception]:
        """Read rows; thread-safe, as every call has its own file handle."""
        try:
            with self.path.open("rb", buffering=0) as file:
                return [self._row(file, index) for index in indices]
        except OSError as fault:
            return [fault for _ in indices]

    def _row(self, file: IO[bytes], index: int) -> NDArray[np.generic] | Exception:
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        file.seek(self.offset + index * size)
        content = file.read(size)
        if len(content) < size:
            return EOFError(f"the file ends within row {index}")
        return np.frombuffer(content, self.dtype).reshape(self.shape[1:])


def rows_of_npy(path: Path) -> ArrayRows:
    """The array in a .npy file."""
    with _reading(path, "a NumPy array (.npy)"), path.open("rb") as file:
        shape, dtype = _header(file, str(path))
        return ArrayRows(path, file.tell(), shape, dtype)


def rows_of_npz(path: Path, member: str) -> ArrayRows:
    """One array of a .npz file: read in place if it is stored, or from a temporary copy if it is compressed."""
    with _reading(path, f"a NumPy archive (.npz) with the array '{member}'"):
        with zipfile.ZipFile(path) as archive:
            info = archive.getinfo(member + ".npy")
            with archive.open(info) as file:
                shape, dtype = _header(file, f"{path}, array '{member}'")
                start = file.tell()
                if info.compress_type != zipfile.ZIP_STORED:
                    copy = _Temporary()
                    copy.fill(file)
                    return ArrayRows(copy.path, 0, shape, dtype, keep=copy)
        with path.open("rb") as file:  # the lengths of name and extra field are in the member's own header
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
        return ArrayRows(path, info.header_offset + 30 + name_length + extra_length + start, shape, dtype)


def small_array(path: Path, member: str | None = None) -> NDArray[np.generic]:
    """Load a whole array, for labels and names; pickled objects are refused, as loading them can run code."""
    with _reading(path, "a NumPy array" if member is None else f"a NumPy archive with the array '{member}'"):
        loaded = np.load(path, allow_pickle=False)
        if member is None:
            return np.asarray(loaded)
        with loaded:
            return np.asarray(loaded[member])


def image_rows(pixels: ArrayRows, indices: Sequence[int]) -> list[Image | Exception]:
    """Rows as images; a row that cannot be read gives its exception."""

    def image(row: NDArray[np.generic] | Exception) -> Image:
        if isinstance(row, Exception):
            raise row
        return from_array(row)

    return read_each(image, pixels.rows(indices))


def label_tensor(array: NDArray[np.generic], expected: int, where: str) -> Tensor:
    """Labels as int64; (n, 1) counts as (n,)."""
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{where} has shape {array.shape} and type {array.dtype}; expected one whole number per image")
    if len(array) != expected:
        raise UserError(f"{where} has {len(array)} labels, but there are {expected} images")
    if not expected:
        raise UserError(f"{where} is empty; expected at least one image")
    if array.dtype.kind == "u" and int(array.max()) >= 2**63:
        raise UserError(f"{where} has the label {int(array.max())}; class numbers start at 0 and are small")
    return torch.from_numpy(array.astype(np.int64))


class _Temporary:
    """A temporary file that is deleted with its last reference, or when Python exits."""

    def __init__(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="vitadel-", suffix=".raw")
        os.close(descriptor)
        self.path = Path(name)
        self._cleanup = weakref.finalize(self, self.path.unlink, missing_ok=True)

    def fill(self, source: IO[bytes]) -> None:
        try:
            with self.path.open("wb") as file:
                while piece := source.read(_PIECE):
                    file.write(piece)
        except BaseException:
            self._cleanup()
            raise


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], np.dtype[np.generic]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if any(side < 0 for side in shape) or math.prod(shape) * dtype.itemsize > _LARGEST_ARRAY:
        raise UserError(f"{where} claims the impossible shape {shape}; the file is damaged")
    if dtype.hasobject:
        raise UserError(
            f"{where} holds Python objects, which are not loaded as that could run code; save plain numbers"
        )
    if fortran and len(shape) > 1:
        raise UserError(f"{where} is in Fortran order; save numpy.ascontiguousarray(...) of it")
    return shape, dtype


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, KeyError, struct.error, zipfile.BadZipFile, zlib.error, *_HEADER_ERRORS) as fault:
        raise UserError(f"'{path}' cannot be read: {fault}; expected {expected}") from fault
