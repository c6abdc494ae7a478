"""Tables of a report: columns that know their digits, rows with numbers in full, and files in three formats.

CSV holds numbers in full; LaTeX and Markdown round them, each column to its own number of digits.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitadel.errors import check_known
from vitadel.quantities import p_text, printable, round_percent

Cell = str | int | float | None


@dataclass(frozen=True)
class Column:
    """A heading; `digits` after the point where the column holds numbers, None where it holds text."""

    heading: str
    digits: int | None = None


@dataclass(frozen=True)
class Table:
    """`name` is that of the exported files; without one they are named after the section."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    name: str = ""


def share_columns(name: str) -> tuple[Column, Column, Column]:
    return Column(f"{name}, %", 1), Column(f"{name}, from", 1), Column(f"{name}, to", 1)


def share_cells(entry: Mapping[str, Any] | None, name: str) -> tuple[Cell, Cell, Cell]:
    """A share and its interval in percent; empty cells where it was not measured."""
    if not entry:
        return None, None, None
    low, high = entry["ci95"]
    return 100 * entry[name], 100 * low, 100 * high


def size_cells(model: Mapping[str, Any]) -> tuple[Cell, Cell]:
    """Millions of parameters, and billions of multiply-adds of one image; empty where they are not known."""
    parameters, macs = model.get("parameters"), model.get("macs")
    return None if parameters is None else parameters / 1e6, None if macs is None else macs / 1e9


def mean_columns(name: str) -> tuple[Column, Column, Column]:
    return Column(name, 3), Column(f"{name}, from", 3), Column(f"{name}, to", 3)


def mean_cells(entry: Mapping[str, Any]) -> tuple[Cell, Cell, Cell]:
    return entry["mean"], *entry["ci95"]


def fold_intervals(table: Table, interval: str = "({} to {})") -> Table:
    """The table for reading: intervals in brackets after their numbers, and no column that is empty in all rows."""
    headings = [column.heading for column in table.columns]
    keep = [
        place
        for place in range(len(headings))
        if not _is_end(headings, place) and (not table.rows or any(row[place] is not None for row in table.rows))
    ]
    columns = tuple(table.columns[place] for place in keep)
    rows = tuple(tuple(_with_interval(row, table, headings, place, interval) for place in keep) for row in table.rows)
    return replace(table, columns=columns, rows=rows)


def narrow(table: Table) -> Table:
    """The table for a paper: intervals as in 66.2 [61.5, 70.7], no folders before names, no column that repeats itself.

    Texts, and numbers of images, that are the same in all rows go into the caption.
    """
    table = fold_intervals(table, "[{}, {}]")
    rows = [tuple(_FOLDERS.sub("", cell) if isinstance(cell, str) else cell for cell in row) for row in table.rows]

    def repeats_itself(place: int, column: Column) -> bool:
        moves = (column.digits is None and column.heading not in _STAY) or column.heading == "n"
        return place > 0 and moves and len({row[place] for row in rows}) == 1

    repeated = {place: rows[0][place] for place, column in enumerate(table.columns) if repeats_itself(place, column)}
    kept = [place for place in range(len(table.columns)) if place not in repeated]
    facts = ", ".join(
        f"{table.columns[place].heading} {cell}" for place, cell in repeated.items() if cell not in ("", "none", "yes")
    )
    return replace(
        table,
        caption=f"{table.caption} All rows: {facts}." if facts else table.caption,
        columns=tuple(table.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in rows),
    )


_STAY = ("B", "attack", "images", "check", "title", "verdict")  # what a row is about
_FOLDERS = re.compile(r"(?<![^\s:(])/(?:[^\s/,:]+/)+")  # the folders of an absolute path, also after 'folder:'


def _bare(heading: str) -> str:
    return heading.removesuffix(", %").strip().lower()


def check_columns(wanted: Sequence[str], tables: Sequence[Table]) -> None:
    """Refuse a column that no table has."""
    known = {_bare(column.heading) for table in tables for column in fold_intervals(table).columns}
    for name in wanted:
        check_known("column", name.strip().lower(), sorted(known))


def choose_columns(table: Table, wanted: Sequence[str]) -> Table:
    """The table with only these columns, in their order; unchanged if it has none of them, or nothing is wanted."""
    places = {_bare(column.heading): place for place, column in enumerate(table.columns)}
    kept = [places[name] for name in (each.strip().lower() for each in wanted) if name in places]
    if not kept:
        return table
    columns = tuple(table.columns[place] for place in kept)
    return replace(table, columns=columns, rows=tuple(tuple(row[place] for place in kept) for row in table.rows))


def _is_end(headings: Sequence[str], place: int) -> bool:
    return any(_has_ends(headings, before) for before in (place - 1, place - 2) if before >= 0)


def _has_ends(headings: Sequence[str], place: int) -> bool:
    """Whether the two columns after this one hold the ends of its interval."""
    endings = [heading.rpartition(", ")[2] for heading in headings[place + 1 : place + 3]]
    return endings == ["from", "to"]


def _with_interval(row: Sequence[Cell], table: Table, headings: Sequence[str], place: int, interval: str) -> Cell:
    if not _has_ends(headings, place) or row[place] is None:
        return row[place]
    value, low, high = map(_round, row[place : place + 3], table.columns[place : place + 3])
    return f"{value} {interval.format(low, high)}" if low and high else value


def row_texts(row: Sequence[Cell], table: Table) -> list[str]:
    """A row as it is shown, each number rounded to the digits of its column."""
    return [_round(cell, column) for cell, column in zip(row, table.columns, strict=True)]


def _round(cell: Cell, column: Column) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return printable(cell)
    if not isinstance(cell, float):
        return str(cell)
    digits = column.digits or 0
    if column.heading.startswith("p ("):
        return p_text(cell).replace(" ", "")
    return round_percent(cell, digits) if column.heading.endswith("%") else f"{cell:.{digits}f}"


def as_csv(table: Table) -> str:
    """Numbers in full. Text that a spreadsheet would run as a formula gets an apostrophe before it."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([_harmless(column.heading) for column in table.columns])
    for row in table.rows:
        writer.writerow(["" if cell is None else _harmless(cell) if isinstance(cell, str) else cell for cell in row])
    return buffer.getvalue()


def _harmless(text: str) -> str:
    risky = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if risky else text


_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?")


def as_markdown(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(in_markdown(cell) for cell in cells)} |"

    rule = "|".join("---" if column.digits is None else "---:" for column in table.columns)
    head = [f"*{in_markdown(table.caption)}*", "", line([column.heading for column in table.columns]), f"|{rule}|"]
    return "\n".join([*head, *(line(row_texts(row, table)) for row in table.rows)]) + "\n"


def in_markdown(text: str) -> str:
    """Text with every mark escaped that Markdown or HTML would read."""
    escaped: dict[str, str | int | None] = {mark: f"\\{mark}" for mark in "\\`*_[]|#"}
    return printable(text).translate(str.maketrans(escaped | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}))


def _in_latex(text: str) -> str:
    escaped: dict[str, str | int | None] = {mark: f"\\{mark}" for mark in "&%$#_{}"}
    escaped |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escaped |= {"<": r"\textless{}", ">": r"\textgreater{}", '"': r"\char34{}"}
    return printable(text).translate(str.maketrans(escaped))


def as_latex(table: Table) -> str:
    """A `table` for \\usepackage{booktabs}; everything that TeX would read as a command is escaped."""
    aligned = "".join("l" if column.digits is None else "r" for column in table.columns)

    def line(cells: Sequence[str]) -> str:
        # An empty group first: a line that begins with a bracket or a star would be read as an option of the last one.
        return "{}" + " & ".join(map(_in_latex, cells)) + r" \\"

    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_in_latex(table.caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{aligned}}}",
        r"\toprule",
        line([column.heading for column in table.columns]),
        r"\midrule",
        *(line(row_texts(row, table)) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


FORMATS: Mapping[str, Callable[[Table], str]] = {"csv": as_csv, "tex": as_latex, "md": as_markdown}
