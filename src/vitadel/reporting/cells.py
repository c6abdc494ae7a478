"""What a table of a report is made of: columns that know their digits, and rows with numbers in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitadel.reporting.figures import printable

__all__ = ["Cell", "Column", "Table", "share_cells", "share_columns", "texts"]

Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading; `digits` after the point where the column holds numbers, None where it holds text."""

    heading: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


def share_cells(entry: Mapping[str, Any] | None, name: str) -> tuple[Cell, Cell, Cell]:
    """A share and its interval in percent; nothing where it was not measured."""
    if not entry:
        return None, None, None
    low, high = entry["ci95"]
    return 100 * entry[name], 100 * low, 100 * high


def share_columns(name: str) -> tuple[Column, Column, Column]:
    return Column(f"{name}, %", 1), Column(f"{name}, from", 1), Column(f"{name}, to", 1)


def texts(row: Sequence[Cell], table: Table) -> list[str]:
    """A row as it is shown, each number rounded to the digits of its column."""
    return [_rounded(cell, column) for cell, column in zip(row, table.columns, strict=True)]


def _rounded(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    return f"{cell:.{column.digits or 0}f}" if isinstance(cell, float) else str(cell)
