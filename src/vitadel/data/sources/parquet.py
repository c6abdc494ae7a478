"""`parquet:FILE-OR-GLOB`: encoded images in a column, in the layout that the Hugging Face Hub uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from vitadel.data.images import attempts, decode
from vitadel.data.labels import number_labels
from vitadel.data.paths import matching_files
from vitadel.data.sources.columns import IMAGE_NAMES, LABEL_NAMES, pick_column
from vitadel.data.sources.row_group_cache import Spool
from vitadel.data.spec import Request
from vitadel.errors import UserError

__all__ = ["ParquetImages", "open_parquet"]

_ROWS_AT_ONCE = 16
_READ_BUFFER = 1 << 20  # with it, and no pre-buffering, Arrow holds a page or two and not all of a group


@dataclass(frozen=True)
class _RowGroups:
    """Streams the image column of a row group; groups are numbered over all files."""

    files: tuple[Path, ...]
    column: str
    places: tuple[tuple[int, int], ...]  # (file, row group within it)

    def __call__(self, group: int) -> Iterator[bytes | None]:
        file, inner = self.places[group]
        with pq.ParquetFile(self.files[file], buffer_size=_READ_BUFFER, pre_buffer=False) as parquet:
            for batch in parquet.iter_batches(
                _ROWS_AT_ONCE, row_groups=[inner], columns=[self.column], use_threads=False
            ):
                cells = batch.column(0)
                if pa.types.is_struct(cells.type):
                    cells = cells.flatten()[_bytes_field(cells.type)]  # a null struct gives null bytes
                for cell in cells:
                    yield cell.as_py()


@dataclass(frozen=True, eq=False)
class ParquetImages:
    """Rows of Parquet files, in the order of the files; row groups are streamed to disk when first touched."""

    files: tuple[Path, ...]
    column: str
    classes: tuple[str, ...] = field(repr=False)
    targets: Tensor = field(repr=False)
    spool: Spool = field(repr=False)
    first_rows: NDArray[np.int64] = field(repr=False)  # of each group, over all files
    first_of_file: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def labels(self) -> Tensor:
        return self.targets

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        return attempts(self._picture, indices)

    def name(self, index: int) -> str:
        file = int(np.searchsorted(self.first_of_file, index, side="right")) - 1
        return f"{self.files[file].name} row {index - int(self.first_of_file[file])}"

    def _picture(self, index: int) -> Image:
        group = int(np.searchsorted(self.first_rows, index, side="right")) - 1
        content = self.spool.row(group, index - int(self.first_rows[group]))
        if content is None:
            raise ValueError(f"column '{self.column}' holds no image bytes in this row")
        return decode(content)


def open_parquet(request: Request) -> ParquetImages:
    """Finds the columns of images and labels by type and name; `parquet:FILE(image=...,label=...)` names them."""
    chosen = request.chosen(image=str, label=str)
    files = matching_files(request, ".parquet")
    schema, rows_of_groups = _survey(files)
    image, label = _columns(schema, request, chosen)
    labels, classes = number_labels(_label_column(files, label), _feature_names(schema, label))
    if not len(labels):
        raise UserError(f"{_the(files)} has no rows (from {request.spec})")
    groups = tuple((file, inner) for file, sizes in enumerate(rows_of_groups) for inner in range(len(sizes)))
    sizes = np.array([size for sizes in rows_of_groups for size in sizes], dtype=np.int64)
    totals = np.array([sum(sizes) for sizes in rows_of_groups], dtype=np.int64)
    return ParquetImages(
        files=tuple(files),
        column=image,
        classes=classes,
        targets=labels,
        spool=Spool(_RowGroups(tuple(files), image, groups)),
        first_rows=np.cumsum(sizes) - sizes,
        first_of_file=np.cumsum(totals) - totals,
    )


def _columns(schema: Any, request: Request, chosen: dict[str, str]) -> tuple[str, str]:
    where = f"'{request.argument}' (columns: {', '.join(f'{item.name} {item.type}' for item in schema)})"
    image = pick_column(
        "image", [item.name for item in schema if _holds_bytes(item.type)], IMAGE_NAMES, chosen.get("image"), where
    )
    labels = [item.name for item in schema if _holds_labels(item.type)]
    return image, pick_column("label", labels, LABEL_NAMES, chosen.get("label"), where)


def _survey(files: Sequence[Path]) -> tuple[Any, list[list[int]]]:
    """The first file's schema, and per file the number of rows in each of its row groups."""
    first, sizes = None, []
    for path in files:
        try:
            with pq.ParquetFile(path) as parquet:
                schema, metadata = parquet.schema_arrow, parquet.metadata
                sizes.append([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)])
        except (OSError, pa.ArrowException) as fault:
            raise UserError(f"'{path}' cannot be read: {fault}; expected a Parquet file") from fault
        if first is not None and schema.names != first.names:
            raise UserError(
                f"'{path}' has columns {', '.join(schema.names)}, but '{files[0]}' has {', '.join(first.names)}; "
                f"give files of one data set"
            )
        first = first or schema
    return first, sizes


def _label_column(files: Sequence[Path], column: str) -> list[int | str | None]:
    labels: list[int | str | None] = []
    for path in files:
        try:
            cells = pq.read_table(path, columns=[column], partitioning=None).column(0)
        except (OSError, pa.ArrowException) as fault:
            raise UserError(f"'{path}': the labels in column '{column}' cannot be read: {fault}") from fault
        labels += cells.to_pylist()
    return labels


def _feature_names(schema: Any, label: str) -> list[str] | None:
    """Class names from the features that `datasets` writes into the schema."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) and names else None


def _bytes_field(kind: Any) -> int:
    return int(kind.get_field_index("bytes"))


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_struct(kind):
        return _bytes_field(kind) >= 0 and _holds_bytes(kind.field("bytes").type)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _holds_labels(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _the(files: Sequence[Path]) -> str:
    return f"'{files[0]}'" if len(files) == 1 else f"'{files[0]}' and {len(files) - 1} more"
