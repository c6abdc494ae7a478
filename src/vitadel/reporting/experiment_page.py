"""Experiments on a page: question and rule, decisions with both intervals, and how results are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitadel.quantities import listed
from vitadel.reporting.figures import COLORS, Picture, new_figure, style_axes
from vitadel.reporting.kind import Section
from vitadel.reporting.tables import Column, Table


def summary(found: Mapping[str, Any]) -> str:
    """The primary contrasts in a sentence."""
    experiment = found["experiment"]
    primary = [entry for entry in experiment["contrasts"] if entry["primary"]]
    counts = Counter(entry["verdict"] for entry in primary)
    said = listed([f"{counts[word]} {word}" for word in ("confirmed", "refuted", "undecided") if counts[word]])
    failed = f" {len(found['errors'])} rows failed." if found["errors"] else ""
    where = f" In small: {found['small']}." if found["small"] else ""
    of = f"{len(primary)} primary contrast{'s' * (len(primary) > 1)}"
    return f"{experiment['question']} Of {of}: {said}.{where}{failed}"


def decision_section(found: Mapping[str, Any]) -> Section:
    """Question, design and rule, and a table of all contrasts."""
    experiment = found["experiment"]
    return Section(
        "Decisions",
        lambda: _draw_decisions(found),
        "Squares are the mean differences, thin lines the interval that decides, thick lines that over images alone; "
        "rings are the seeds.",
        [_decisions(found)],
        [
            f"Question: {experiment['question']}",
            f"Design, fixed before any result: {experiment['design']}",
            f"Known when it was designed: {experiment['known']}.",
            f"Rule: {experiment['rule']}",
        ],
        file="decisions",
    )


def _decisions(found: Mapping[str, Any]) -> Table:
    columns = (
        *(Column("contrast"), Column("question"), Column("difference", 3), Column("from", 3), Column("to", 3)),
        *(Column("images, from", 3), Column("images, to", 3), Column("seeds, +-", 3), Column("each seed")),
        *(Column("worth", 3), Column("n", 0), Column("verdict")),
    )
    rows = []
    for entry in found["experiment"]["contrasts"]:
        low, high = entry["interval"] or (None, None)
        first, last = entry["images"] or (None, None)
        seeds = " / ".join(f"{value:+.3g}" for value in entry["seeds"])
        verdict = entry["verdict"] + (f" ({entry['why']})" if entry["why"] else "")
        name = entry["id"] if entry["primary"] else f"{entry['id']} (second)"
        rows.append(
            (
                *(name, entry["question"], entry["difference"], low, high, first, last),
                *(entry["spread"], seeds, entry["worth"], entry["n"], verdict),
            )
        )
    return Table(
        "Contrasts, in the unit of their columns (percentage points, unless it is no share).", columns, (*rows,)
    )


def _draw_decisions(found: Mapping[str, Any]) -> Picture | None:
    """One line for each contrast in percent."""
    percent = {column["column"]: column["percent"] for column in found["columns"]}
    shown = [
        entry
        for entry in found["experiment"]["contrasts"]
        if entry["difference"] is not None and percent.get(entry["column"] or entry["plus"][0])
    ]
    if not shown:
        return None
    height = 70 + 26 * len(shown)
    with new_figure(height) as figure:
        axes = figure.add_axes((0.24, 50 / height, 0.72, 1 - 58 / height), ylim=(len(shown) - 0.5, -0.5))
        axes.axvline(0, color=COLORS["muted"], linewidth=1)
        for place, entry in enumerate(shown):
            if entry["interval"]:
                axes.plot(entry["interval"], [place] * 2, "-", color=COLORS["worst"], linewidth=1)
            axes.plot(entry["images"], [place] * 2, "-", color=COLORS["worst"], linewidth=3, alpha=0.5)
            axes.plot(entry["seeds"], [place] * len(entry["seeds"]), "o", markerfacecolor="none", color=COLORS["muted"])
            axes.plot([entry["difference"]], [place], "s", color=COLORS["worst"])
        axes.set_yticks(range(len(shown)), [entry["id"] for entry in shown])
        axes.set_xlabel("difference, percentage points")
        style_axes(axes)
    return Picture("decisions", figure, f"Differences of {listed([entry['id'] for entry in shown])}.")


def draw_results(found: Mapping[str, Any]) -> Picture | None:
    """The figure that the experiment asks for."""
    figure = found["figure"]
    return _draw_profile(found, figure["profile"]) if figure["profile"] else _draw_plane(found, figure)


def _cells(found: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {column["column"]: cell for column, cell in zip(found["columns"], row["cells"], strict=True)}


def _titles(found: Mapping[str, Any]) -> dict[str, str]:
    return {
        column["column"]: f"{column['title']}, %" if column["percent"] else column["title"]
        for column in found["columns"]
    }


def _draw_plane(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Picture | None:
    """Rows as points; the area of a mark grows with the logarithm of `size`."""
    points = []
    for row in found["rows"]:
        cells = _cells(found, row)
        x, y, size = (cells.get(asked[name], {}).get("ours") for name in ("x", "y", "size"))
        if x is not None and y is not None:
            points.append((row["row"], x, y, size))
    if not points:
        return None
    titles = _titles(found)
    with new_figure(420) as figure:
        axes = figure.add_axes((0.1, 0.14, 0.86, 0.82))
        axes.scatter(
            [x for _, x, _, _ in points],
            [y for _, _, y, _ in points],
            s=_areas([size for *_, size in points]),
            alpha=0.6,
            color=COLORS["worst"],
        )
        for name, x, y, _ in points:
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(6, 6), fontsize=8, color=COLORS["ink"])
        axes.set_xlabel(titles[asked["x"]])
        axes.set_ylabel(titles[asked["y"]])
        style_axes(axes)
    return Picture("plane", figure, f"{titles[asked['y']]} against {titles[asked['x']]}; marks grow with cost.")


def _areas(sizes: Sequence[float | None]) -> list[float]:
    known = [size for size in sizes if size]
    least = min(known, default=1.0)
    return [20.0 if not size else 40.0 + 60.0 * float(np.log10(size / least)) for size in sizes]


def _draw_profile(found: Mapping[str, Any], names: Sequence[str]) -> Picture | None:
    """A line for each row over the columns in their order, with intervals."""
    titles = _titles(found)
    known = {column["column"] for column in found["columns"]}
    places = [name for name in names if name in known]
    lines = []
    for row in found["rows"]:
        cells = _cells(found, row)
        points = [(place, cells[name]) for place, name in enumerate(places) if cells[name]["ours"] is not None]
        if points:
            lines.append((row["row"], points))
    if not lines:
        return None
    with new_figure(440) as figure:
        axes = figure.add_axes((0.1, 0.36, 0.86, 0.6))
        for number, (name, points) in enumerate(lines):
            at = [place + 0.08 * (number - (len(lines) - 1) / 2) for place, _ in points]
            values = [cell["ours"] for _, cell in points]
            reach = [
                [
                    value - cell["ci95"][0] if cell["ci95"] else 0.0
                    for value, (_, cell) in zip(values, points, strict=True)
                ],
                [
                    cell["ci95"][1] - value if cell["ci95"] else 0.0
                    for value, (_, cell) in zip(values, points, strict=True)
                ],
            ]
            axes.errorbar(at, values, yerr=np.clip(reach, 0, None), fmt="o-", markersize=4, capsize=2, label=name)
        axes.set_xticks(
            range(len(places)), [titles[name].removesuffix(", %") for name in places], rotation=60, ha="right"
        )
        axes.set_ylabel("accuracy, %")
        axes.legend(fontsize=8, frameon=False)
        style_axes(axes)
    return Picture(
        "profile", figure, f"Accuracy of {listed([name for name, _ in lines])}, with 95 % intervals over images."
    )
