"""Robust accuracy against eps, steps and restarts for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitadel.reporting.cells import Column, Table, share_cells, share_columns
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, interval_text, percent
from vitadel.reporting.study import Study, Told

__all__ = ["CURVES", "curves_sentence", "curves_tables", "draw_curves"]


def draw_curves(run: Run) -> Picture | None:
    """One panel for each curve, with the points at equal distances: they grow by factors."""
    told = run.results["study"]
    with our_style():
        figure = blank(280)
        shown = told["curves"]
        width = 0.93 / len(shown)
        for number, curve in enumerate(shown):
            axes = figure.add_axes((0.065 + number * width, 0.2, width - 0.045, 0.72), ylim=(0, 101))
            _draw_curve(axes, curve)
            axes.set_xlabel(_heading(told, curve))
            if number == 0:
                axes.set_ylabel("accuracy, %")
    return Picture("curves", figure, f"Robust accuracy with 95 % intervals. {curves_sentence(told)}")


def _draw_curve(axes: Any, curve: Told) -> None:
    points = curve["points"]
    places, values = range(len(points)), [100 * point["robust_accuracy"] for point in points]
    ends = [[100 * end for end in point["ci95"]] for point in points]
    spread = [
        [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)],
        [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)],
    ]
    style = {"color": COLOURS["worst"], "linewidth": 1.5, "marker": "o", "markersize": 4, "capsize": 3}
    axes.errorbar(places, values, spread, **style, label="each attack alone" if "worst_so_far" in points[0] else None)
    if "worst_so_far" in points[0]:
        lower = [100 * point["worst_so_far"]["robust_accuracy"] for point in points]
        axes.plot(places, lower, color=COLOURS["muted"], linestyle=":", linewidth=1.2, label="with smaller budgets")
        axes.legend(frameon=False, fontsize=8, labelcolor=COLOURS["muted"])
    axes.set_xticks(
        places, [point["text"].removesuffix("/255") if _of_255(points) else point["text"] for point in points]
    )
    axes.set_xlim(-0.3, max(len(points) - 0.7, 0.3))
    plain_axes(axes)


def _of_255(points: Sequence[Told]) -> bool:
    return all(point["text"] == "0" or point["text"].endswith("/255") for point in points)


def _heading(told: Told, curve: Told) -> str:
    if curve["against"] != "eps":
        return f"{curve['against']} (eps {told['eps_text']})"
    return "eps, of 255" if _of_255(curve["points"]) else "eps"


def curves_sentence(told: Told) -> str:
    """From where to where each curve goes, and every place where it goes the wrong way."""
    of_steps = "" if told["steps"] is None else f" ({told['steps']} steps unless said otherwise)"
    parts = [
        f"{percent(first['robust_accuracy'])} at {_at(curve, first)} to {percent(last['robust_accuracy'])} at "
        f"{_at(curve, last)}"
        for curve in told["curves"]
        for first, last in [(curve["points"][0], curve["points"][-1])]
    ]
    sentence = f"Under {told['attack']}{of_steps}, {told['norm']}, n = {told['n']:,}, accuracy goes from "
    return f"{sentence}{'; from '.join(parts)}. {_monotony(told)}"


def _at(curve: Told, point: Told) -> str:
    if curve["against"] == "eps":
        return f"eps {point['text']}"
    return f"{point['text']} {curve['against'] if point['at'] != 1 else curve['against'].removesuffix('s')}"


def _monotony(told: Told) -> str:
    def where(clear: bool) -> str:
        return "; ".join(
            f"with {curve['against']} from {rise['from']} to {rise['to']} by {rise['images']} of {told['n']:,} images"
            for curve in told["curves"]
            for rise in curve["rises"]
            if rise["clear"] == clear
        )

    wrong, chance = where(True), where(False)
    if wrong:
        return f"A curve rises where it should not, {wrong}: see 'vitadel diagnose'."
    return f"What rises does so within chance: {chance}." if chance else "No curve rises."


def curves_tables(told: Told) -> list[Table]:
    columns = (Column("against"), Column("at"), *share_columns("accuracy"), *share_columns("worst so far"))
    rows = tuple(
        (
            curve["against"],
            point["text"],
            *share_cells(point, "robust_accuracy"),
            *share_cells(point.get("worst_so_far"), "robust_accuracy"),
        )
        for curve in told["curves"]
        for point in curve["points"]
    )
    return [Table("", "Robust accuracy of all images, judged on the deployed model.", columns, rows)]


def _remarks(told: Told) -> list[str]:
    clean = told["clean"]
    return [
        f"Without an attack {percent(clean['accuracy'])} ({interval_text(clean['ci95'])}) are classified correctly.",
        *(f"Against {curve['against']}: {curve['how']}." for curve in told["curves"]),
    ]


CURVES = Study(
    "Robust accuracy against effort",
    "Bars are 95 % intervals (Wilson 1927). More budget, more steps and more restarts can only help an attacker.",
    curves_sentence,
    draw_curves,
    curves_tables,
    _remarks,
)
