"""Study `curves`: robust accuracy against eps, steps and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitadel.quantities import percent, share_text
from vitadel.reporting.figures import COLORS, Picture, add_legend, interval_reach, new_figure, style_axes
from vitadel.reporting.kind import Results, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table, share_cells, share_columns


def _draw(run: Run) -> Picture:
    """One panel for each curve, with the points at equal distances: they grow by factors."""
    found = run.results["study"]
    with new_figure(280) as figure:
        shown = found["curves"]
        width = 0.93 / len(shown)
        for number, curve in enumerate(shown):
            axes = figure.add_axes((0.065 + number * width, 0.2, width - 0.045, 0.72), ylim=(0, 101))
            _draw_curve(axes, curve)
            axes.set_xlabel(_heading(found, curve))
            if number == 0:
                axes.set_ylabel("accuracy, %")
    return Picture("curves", figure, f"Robust accuracy with 95 % intervals. {_sentence(found)}")


def _draw_curve(axes: Any, curve: Results) -> None:
    points = curve["points"]
    places, values = range(len(points)), [100 * point["robust_accuracy"] for point in points]
    spread = interval_reach(points, "robust_accuracy")
    style = {"color": COLORS["worst"], "linewidth": 1.5, "marker": "o", "markersize": 4, "capsize": 3}
    axes.errorbar(places, values, spread, **style, label="each attack alone" if "worst_so_far" in points[0] else None)
    if "worst_so_far" in points[0]:
        lower = [100 * point["worst_so_far"]["robust_accuracy"] for point in points]
        axes.plot(places, lower, color=COLORS["muted"], linestyle=":", linewidth=1.2, label="with smaller budgets")
        add_legend(axes, fontsize=8)
    axes.set_xticks(
        places, [point["text"].removesuffix("/255") if _of_255(points) else point["text"] for point in points]
    )
    axes.set_xlim(-0.3, max(len(points) - 0.7, 0.3))
    style_axes(axes)


def _of_255(points: Sequence[Results]) -> bool:
    return all(point["text"] == "0" or point["text"].endswith("/255") for point in points)


def _heading(found: Results, curve: Results) -> str:
    if curve["against"] != "eps":
        return f"{curve['against']} (eps {found['eps_text']})"
    return "eps, of 255" if _of_255(curve["points"]) else "eps"


def _sentence(found: Results) -> str:
    """Both ends of each curve, and every place where it rises."""
    of_steps = "" if found["steps"] is None else f" ({found['steps']} steps unless stated otherwise)"
    parts = [
        f"{percent(first['robust_accuracy'])} at {_at(curve, first)} to {percent(last['robust_accuracy'])} at "
        f"{_at(curve, last)}"
        for curve in found["curves"]
        for first, last in [(curve["points"][0], curve["points"][-1])]
    ]
    sentence = f"Under {found['attack']}{of_steps}, {found['norm']}, n = {found['n']:,}, accuracy goes from "
    return f"{sentence}{'; from '.join(parts)}. {_monotony(found)}"


def _at(curve: Results, point: Results) -> str:
    if curve["against"] == "eps":
        return f"eps {point['text']}"
    return f"{point['text']} {curve['against'] if point['at'] != 1 else curve['against'].removesuffix('s')}"


def _monotony(found: Results) -> str:
    def where(clear: bool) -> str:
        return "; ".join(
            f"with {curve['against']} from {rise['from']} to {rise['to']} by {rise['images']} of {found['n']:,} images"
            for curve in found["curves"]
            for rise in curve["rises"]
            if rise["clear"] == clear
        )

    wrong, chance = where(True), where(False)
    if wrong:
        return f"A curve rises where it should not, {wrong}: see 'vitadel diagnose'."
    return f"Rises are within chance: {chance}." if chance else "No curve rises."


def _tables(found: Results) -> list[Table]:
    columns = (Column("against"), Column("at"), *share_columns("accuracy"), *share_columns("worst so far"))
    rows = tuple(
        (
            curve["against"],
            point["text"],
            *share_cells(point, "robust_accuracy"),
            *share_cells(point.get("worst_so_far"), "robust_accuracy"),
        )
        for curve in found["curves"]
        for point in curve["points"]
    )
    return [Table("Robust accuracy of all images, judged on the deployed model.", columns, rows)]


def _remarks(found: Results) -> list[str]:
    clean = found["clean"]
    return [
        f"Without an attack {share_text(clean, 'accuracy')} are classified correctly.",
        *(f"Against {curve['against']}: {curve['how']}." for curve in found["curves"]),
    ]


KIND = study(
    "Robust accuracy against effort",
    "Bars are 95 % intervals (Wilson 1927). More budget, more steps and more restarts can only help an attacker.",
    _sentence,
    _draw,
    _tables,
    _remarks,
)
