"""A table of a paper, reproduced: its numbers beside ours, and what becomes of its claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vitadel.quantities import listed
from vitadel.reporting.experiment_page import decision_section, draw_results, summary
from vitadel.reporting.figures import COLORS, Picture, new_figure, style_axes
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table, size_cells

_RULE = (
    "Images are the samples: of each image the difference is summed over seeds, and the signs are tested (for one "
    "seed, McNemar's exact test); other numbers are compared by a paired permutation test. P-values are "
    "adjusted over all comparisons of the table (Holm). A claim holds or does not hold at 5 %, if all seeds have the "
    "same sign. With one seed this is about these trained models, not about the method: trainings differ from seed to "
    "seed."
)


def _sentence(run: Run) -> str:
    found = run.results["reproduce"]
    if "experiment" in found:
        return summary(found)
    counts = Counter(entry["verdict"] for entry in found["claims"])
    said = listed([f"{counts[verdict]} {_WORDS[verdict]}" for verdict in _WORDS if counts[verdict]])
    failed = f" {len(found['errors'])} rows failed." if found["errors"] else ""
    where = f" In small: {found['small']}." if found["small"] else ""
    claims = f"{len(found['claims'])} comparisons that the paper claims: {said}." if said else "No claim was tested."
    return f"{found['title']} ({found['paper']}, {found['table']}).{where} {claims}{failed}"


_WORDS = {"holds": "confirmed", "does not hold": "contradicted", "cannot be told": "undecided"}


def _sections(run: Run) -> list[Section]:
    found = run.results["reproduce"]
    ours = "experiment" in found
    sections = [decision_section(found)] if ours else []
    if "figure" in found:
        sections.append(Section("Results", lambda: draw_results(found), file="results"))
    sections += [
        Section(
            "All numbers" if ours else "Paper and ours",
            lambda: _draw(found),
            ("Squares" if ours else "Circles are the paper's numbers, squares ours,")
            + (" are means over seeds," if ours else "")
            + " with 95 % intervals over images.",
            [table for place, _ in enumerate(found["columns"]) if (table := _column(found, place)).rows],
            _remarks(found),
            file="values",
            exported=[_values(found)],
        )
    ]
    if (sizes := _sizes(found)).rows:
        sections.append(Section("Sizes", tables=[sizes], file="sizes"))
    if found["claims"]:
        sections.append(Section("Claims", tables=[_claims(found)], remarks=[_RULE], file="claims"))
    if lacking := _lacking(found):
        sections.append(Section("Not run", tables=[lacking], file="not-run"))
    return sections


def _remarks(found: Mapping[str, Any]) -> list[str]:
    ours = "experiment" in found
    remarks = [f"Protocol{'' if ours else ' of the paper'}: {found['protocol']}."]
    if found["given_data"] and ours:
        remarks.append(f"Trained on {found['given_data']}.")
    if found["small"] and ours:
        remarks.append(f"In small: {found['small']}.")
    elif found["small"]:
        data = f" on {found['given_data']}" if found["given_data"] else ""
        remarks.append(f"Ours is in small{data} ({found['small']}): compare orderings, not numbers.")
    remarks += [f"{row['row']}: {row['note']}." for row in found["rows"] if row["note"]]
    remarks += [
        f"{row['row']}, {column['title']}: {', '.join(cell['page'])}"
        for row in found["rows"]
        for column, cell in zip(found["columns"], row["cells"], strict=True)
        if cell.get("page")
    ]
    return remarks + list(found["notes"]) + [f"Source: {found['citation']}."]


def _values(found: Mapping[str, Any]) -> Table:
    """One line for each cell: what the paper prints, ours with its interval, and, unless in small, the difference."""
    printed = "experiment" not in found
    subtracted = printed and not found["small"]
    columns = (
        *(Column("row"), Column("column"), *((Column("paper", 2),) if printed else ()), Column("ours", 2)),
        *(
            *(Column("ours, from", 2), Column("ours, to", 2)),
            *((Column("difference", 2),) if subtracted else ()),
            Column("n", 0),
            Column("seeds"),
        ),
    )
    rows: list[tuple[Cell, ...]] = []
    for row in found["rows"]:
        for column, cell in zip(found["columns"], row["cells"], strict=True):
            if cell["published"] is None and cell["ours"] is None:
                continue
            low, high = cell["ci95"] or (None, None)
            each = " / ".join(f"{value:.2f}" for value in cell["seeds"]) if len(cell["seeds"]) > 1 else ""
            rows.append(
                (
                    *(row["row"], column["title"], *((cell["published"],) if printed else ()), cell["ours"], low, high),
                    *((cell.get("difference"),) if subtracted else ()),
                    *(cell["n"], each),
                )
            )
    what = "the paper's numbers and ours" if printed else "means over seeds, with the value of each"
    return Table(f"{found['title']}: {what}.", columns, tuple(rows))


def _column(found: Mapping[str, Any], place: int) -> Table:
    """The same for one column of the paper, for the page."""
    whole = _values(
        {
            **found,
            "columns": [found["columns"][place]],
            "rows": [{**row, "cells": [row["cells"][place]]} for row in found["rows"]],
        }
    )
    columns = (whole.columns[0], *whole.columns[2:])
    rows = tuple((row[0], *row[2:]) for row in whole.rows)
    return Table(found["columns"][place]["title"], columns, rows)


def _sizes(found: Mapping[str, Any]) -> Table:
    """The models of the rows. Where the paper has such columns, they are with its own numbers."""
    columns = (Column("row"), Column("parameters, M", 3), Column("GMACs", 3))
    printed = {"parameters", "gmacs"} & {column["column"] for column in found["columns"]}
    rows = [] if printed else [(row["row"], *size_cells(row["size"])) for row in found["rows"] if row.get("size")]
    return Table("Parameters of our models, and multiply-adds for one image.", columns, tuple(rows))


def _claims(found: Mapping[str, Any]) -> Table:
    columns = (
        *(Column("claim"), Column("higher"), Column("lower"), Column("paper, difference", 2), Column("ours", 2)),
        *(Column("ours, from", 2), Column("ours, to", 2), Column("p (Holm)", 4), Column("verdict")),
    )
    scales = {column["column"]: 100.0 if column["percent"] else 1.0 for column in found["columns"]}
    rows = []
    for entry in found["claims"]:
        scale = scales[entry["higher"][1]]
        low, high = entry["ci95"] or (None, None)
        names = [_cell_name(entry[side], entry) for side in ("higher", "lower")]
        shown = [None if each is None else scale * each for each in (entry["difference"], low, high)]
        rows.append((entry["claim"], *names, entry["published"], *shown, entry["p"], _verdict(entry)))
    return Table("What the paper claims, tested on our runs.", columns, tuple(rows))


def _cell_name(cell: Sequence[str], entry: Mapping[str, Any]) -> str:
    row, column = cell
    same_row, same_column = entry["higher"][0] == entry["lower"][0], entry["higher"][1] == entry["lower"][1]
    return f"{column} of {row}" if same_row and not same_column else f"{row} ({column})"


def _verdict(entry: Mapping[str, Any]) -> str:
    if entry["verdict"] != "cannot be told":
        return str(entry["verdict"])
    seeds = f"{entry['seeds']} seed{'s' * (entry['seeds'] > 1)}"
    return f"cannot be told from {entry['n']} images and {seeds}" if entry["n"] else f"cannot be told from {seeds}"


def _lacking(found: Mapping[str, Any]) -> Table | None:
    rows = [(f"row {row['row']}", "failed", row["error"]) for row in found["rows"] if row["error"]]
    rows += [(f"row {row['row']}", "needs", row["needs"]) for row in found["rows"] if row["needs"]]
    rows += [(f"column {column['title']}", "needs", column["needs"]) for column in found["columns"] if column["needs"]]
    columns = (Column("what"), Column("state"), Column("why"))
    return Table("Rows and columns without a number of ours.", columns, tuple(rows)) if rows else None


def _draw(found: Mapping[str, Any]) -> Picture | None:
    """A panel for each column in percent that has numbers of ours, rows from top to bottom."""
    shown = [
        (place, column)
        for place, column in enumerate(found["columns"])
        if column["percent"] and any(row["cells"][place]["ours"] is not None for row in found["rows"])
    ]
    rows = [row for row in found["rows"] if any(row["cells"][place]["ours"] is not None for place, _ in shown)]
    if not shown or not rows:
        return None
    height = 70 + 30 * len(rows)
    bottom, top = 50 / height, 1 - 8 / height  # room for the names of the columns
    with new_figure(height) as figure:
        width, left = 0.8 / len(shown), 0.18
        for number, (place, column) in enumerate(shown):
            axes = figure.add_axes(
                (left + number * width, bottom, width - 0.02, top - bottom), ylim=(len(rows) - 0.5, -0.5)
            )
            _draw_panel(axes, [row["cells"][place] for row in rows])
            axes.set_yticks(range(len(rows)), [row["row"] for row in rows] if number == 0 else [""] * len(rows))
            axes.set_xlabel(f"{column['title']}, %")
            style_axes(axes)
    return Picture(
        "reproduced",
        figure,
        f"{'Ours' if 'experiment' in found else 'Paper and ours'}, {listed([column['title'] for _, column in shown])}.",
    )


def _draw_panel(axes: Any, cells: Sequence[Mapping[str, Any]]) -> None:
    printed = [(place, cell["published"]) for place, cell in enumerate(cells) if cell["published"] is not None]
    ours = [(place, cell) for place, cell in enumerate(cells) if cell["ours"] is not None]
    axes.plot(
        [value for _, value in printed],
        [place for place, _ in printed],
        "o",
        markerfacecolor="none",
        color=COLORS["muted"],
    )
    reach = [
        [max(0.0, cell["ours"] - cell["ci95"][0]) if cell["ci95"] else 0.0 for _, cell in ours],
        [max(0.0, cell["ci95"][1] - cell["ours"]) if cell["ci95"] else 0.0 for _, cell in ours],
    ]
    values, places = [cell["ours"] for _, cell in ours], [place for place, _ in ours]
    axes.errorbar(values, places, xerr=reach, fmt="s", markersize=4, color=COLORS["worst"], capsize=2)


KIND = Kind(_sentence, _sections, trust=lambda run: None, one_budget=False)
