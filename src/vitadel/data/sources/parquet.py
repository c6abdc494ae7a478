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

from vitadel.data.files import matching_files
from vitadel.data.images import LabeledImages, decode
from vitadel.data.labels import IMAGE_NAMES, LABEL_NAMES, number_labels, pick_column
from vitadel.data.sources.row_group_cache import RowGroupCache
from vitadel.data.spec import DataRequest
from vitadel.errors import UserError

_ROWS_AT_ONCE = 16
_READ_BUFFER = 1 << 20  # with it, and without pre-buffering, Arrow holds a page or two and not a whole group


@dataclass(frozen=True, eq=False)
class ParquetFiles:
    """Parquet files of one data set; rows and row groups are numbered over all files."""

    paths: tuple[Path, ...]
    schemas: tuple[Any, ...] = field(repr=False)
    group_sizes: tuple[tuple[int, ...], ...] = field(repr=False)  # rows of each group, per file

    @classmethod
    def open(cls, request: DataRequest) -> ParquetFiles:
        paths, schemas, sizes = tuple(matching_files(request, ".parquet")), [], []
        for path in paths:
            try:
                with pq.ParquetFile(path) as parquet:
                    metadata = parquet.metadata
                    schemas.append(parquet.schema_arrow)
                    sizes.append(tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)))
            except (OSError, pa.ArrowException) as fault:
                raise UserError(f"'{path}' cannot be read: {fault}; expected a Parquet file") from fault
        return cls(paths, tuple(schemas), tuple(sizes))

    @property
    def schema(self) -> Any:
        return self.schemas[0]

    @property
    def rows(self) -> int:
        return sum(map(sum, self.group_sizes))

    @property
    def columns(self) -> str:
        """For messages."""
        return ", ".join(f"{item.name} {item.type}" for item in self.schema)

    @property
    def encoded(self) -> list[str]:
        """Names of the columns that may hold encoded images."""
        return [item.name for item in self.schema if _holds_bytes(item.type)]

    def check_columns(self, *names: str) -> None:
        """Refuse files without these columns."""
        for path, schema in zip(self.paths, self.schemas, strict=True):
            missing = [name for name in names if name not in schema.names]
            if missing:
                raise UserError(
                    f"'{path}' has columns {', '.join(schema.names)}, but '{self.paths[0]}' has {', '.join(names)}; "
                    f"give files of one data set"
                )

    def row_name(self, index: int) -> str:
        first = _starts([sum(sizes) for sizes in self.group_sizes])
        file = _position(first, index)
        return f"{self.paths[file].name} row {index - int(first[file])}"


@dataclass(frozen=True, eq=False)
class EncodedColumn:
    """A column of encoded images; row groups are streamed to disk when first used."""

    files: ParquetFiles
    name: str
    groups: tuple[tuple[int, int], ...] = field(repr=False)  # (file, row group within it)
    first_rows: NDArray[np.int64] = field(repr=False)  # of each group
    cache: RowGroupCache = field(repr=False)

    @classmethod
    def of(cls, files: ParquetFiles, name: str) -> EncodedColumn:
        groups = tuple((file, inner) for file, sizes in enumerate(files.group_sizes) for inner in range(len(sizes)))
        first_rows = _starts([size for sizes in files.group_sizes for size in sizes])

        def load(group: int) -> Iterator[bytes | None]:
            file, inner = groups[group]
            with pq.ParquetFile(files.paths[file], buffer_size=_READ_BUFFER, pre_buffer=False) as parquet:
                for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[inner], columns=[name], use_threads=False):
                    cells = batch.column(0)
                    if pa.types.is_struct(cells.type):
                        cells = cells.flatten()[_bytes_field(cells.type)]  # a null struct gives null bytes
                    for cell in cells:
                        yield cell.as_py()

        return cls(files, name, groups, first_rows, RowGroupCache(load))

    def cell(self, index: int) -> bytes | None:
        group = _position(self.first_rows, index)
        return self.cache.row(group, index - int(self.first_rows[group]))


def _starts(sizes: Sequence[int]) -> NDArray[np.int64]:
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return np.concatenate([[0], ends[:-1]]).astype(np.int64)


def _position(starts: NDArray[np.int64], index: int) -> int:
    return int(np.searchsorted(starts, index, side="right")) - 1


@dataclass(frozen=True, eq=False)
class ParquetImages(LabeledImages):
    """Rows of Parquet files, in the order of the files."""

    files: ParquetFiles
    column: EncodedColumn
    classes: tuple[str, ...] = field(repr=False)
    targets: Tensor = field(repr=False)

    def name(self, index: int) -> str:
        return self.files.row_name(index)

    def image(self, index: int) -> Image:
        content = self.column.cell(index)
        if content is None:
            raise ValueError(f"column '{self.column.name}' holds no image bytes in this row")
        return decode(content)


def open_parquet(request: DataRequest) -> ParquetImages:
    """Find the columns of images and labels by type and name; `parquet:FILE(image=...,label=...)` names them."""
    settings = request.read_settings(image=str, label=str)
    files = ParquetFiles.open(request)
    where = f"'{request.argument}' (columns: {files.columns})"
    image = pick_column("image", files.encoded, IMAGE_NAMES, settings.get("image"), where)
    candidates = [item.name for item in files.schema if _holds_labels(item.type)]
    label = pick_column("label", candidates, LABEL_NAMES, settings.get("label"), where)
    files.check_columns(image, label)
    labels, classes = number_labels(_label_column(files.paths, label), _feature_names(files.schema, label))
    if not len(labels):
        more = f" and {len(files.paths) - 1} more" if len(files.paths) > 1 else ""
        raise UserError(f"'{files.paths[0]}'{more} has no rows (from {request.spec})")
    return ParquetImages(files, EncodedColumn.of(files, image), classes, labels)


def _label_column(paths: Sequence[Path], column: str) -> list[int | str | None]:
    labels: list[int | str | None] = []
    for path in paths:
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
    except (KeyError, TypeError, ValueError, RecursionError):
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
