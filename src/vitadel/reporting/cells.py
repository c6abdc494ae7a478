"""What a table of a report is made of: columns that know their digits, and rows with numbers in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitadel.reporting.figures import printable

__all__ = ["Cell", "Column", "Table", "folded", "share_cells", "share_columns", "texts"]

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


def folded(table: Table) -> Table:
    """The table to be read: intervals in brackets behind their numbers instead of in two columns of their own."""
    headings = [column.heading for column in table.columns]
    keep = [place for place in range(len(headings)) if not _is_end(headings, place)]
    columns = tuple(table.columns[place] for place in keep)
    rows = tuple(tuple(_with_interval(row, table, headings, place) for place in keep) for row in table.rows)
    return replace(table, columns=columns, rows=rows)


def _is_end(headings: Sequence[str], place: int) -> bool:
    return any(_has_ends(headings, before) for before in (place - 1, place - 2) if before >= 0)


def _has_ends(headings: Sequence[str], place: int) -> bool:
    """Whether the two columns after this one hold the ends of its interval."""
    endings = [heading.rpartition(", ")[2] for heading in headings[place + 1 : place + 3]]
    return endings == ["from", "to"]


def _with_interval(row: Sequence[Cell], table: Table, headings: Sequence[str], place: int) -> Cell:
    if not _has_ends(headings, place) or row[place] is None:
        return row[place]
    value, low, high = (
        _rounded(cell, column) for cell, column in list(zip(row, table.columns, strict=True))[place : place + 3]
    )
    return f"{value} ({low} to {high})" if low and high else value


def texts(row: Sequence[Cell], table: Table) -> list[str]:
    """A row as it is shown, each number rounded to the digits of its column."""
    return [_rounded(cell, column) for cell, column in zip(row, table.columns, strict=True)]


def _rounded(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    return f"{cell:.{column.digits or 0}f}" if isinstance(cell, float) else str(cell)
