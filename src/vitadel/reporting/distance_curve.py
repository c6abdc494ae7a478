"""Robust accuracy against eps, from the smallest known distances of a run with `--curve`."""

from __future__ import annotations

import numpy as np

from vitadel.quantities import quantity_text
from vitadel.reporting.figures import COLORS, Picture, add_legend, interval_reach, new_figure, style_axes
from vitadel.reporting.kind import Section
from vitadel.reporting.read_runs import Run, threat_text
from vitadel.reporting.tables import Column, Table, share_cells, share_columns
from vitadel.statistics import wilson

_CAPTION = (
    "The share of all images whose smallest known distance is larger than eps, with pointwise 95 % intervals (Wilson "
    "1927). Points: the budgets of the table, where the other attacks confirmed. Elsewhere the curve is what the "
    "minimal-norm attacks found, an upper bound."
)
_MOST_POINTS = 400


def curve_section(run: Run) -> Section:
    """The figure and the table of the budgets."""
    found = run.results["curve"]
    columns = (Column("eps"), *share_columns("robust"), Column("images", 0))
    rows = tuple((row["eps_text"], *share_cells(row, "robust_accuracy"), row["n"]) for row in found["budgets"])
    median, area = found["median_distance"], found["area"]
    ends = [*median["ci95"], median["value"]]
    low, high, middle = ("not reached" if end is None else f"{end:.4g}" for end in ends)
    sentences = [
        f"Median distance of the {median['n']:,} correctly classified images: {middle} (95 % interval {low} to "
        f"{high}).",
        f"Area under the curve up to {quantity_text(area['up_to'])}, as a share: {area['value']:.3f} "
        f"({area['ci95'][0]:.3f} to {area['ci95'][1]:.3f}).",
    ]
    table = Table(f"Robust accuracy by budget, {threat_text(run).partition(',')[0]}.", columns, rows, "curve")
    return Section("Robust accuracy at every eps", lambda: _draw(run), _CAPTION, [table], sentences=sentences)


def _draw(run: Run) -> Picture:
    found = run.results["curve"]
    distance = np.sort(run.column("distance"))
    reach, n = 1.15 * found["area"]["up_to"], len(distance)
    places = np.unique(np.append(np.linspace(0, reach, _MOST_POINTS), distance[distance < reach]))
    robust = n - np.searchsorted(distance, places, side="right")
    bounds = 100 * np.array([wilson(int(count), n) for count in robust])
    with new_figure(260) as figure:
        axes = figure.add_axes((0.075, 0.19, 0.9, 0.75), xlim=(0, reach), ylim=(0, 101))
        axes.fill_between(places, bounds[:, 0], bounds[:, 1], step="post", color=COLORS["grid"], linewidth=0)
        axes.step(places, 100 * robust / n, where="post", color=COLORS["worst"], linewidth=1.5, label="every eps")
        rows = found["budgets"]
        values = [100 * row["robust_accuracy"] for row in rows]
        spread = interval_reach(rows, "robust_accuracy")
        style = {"color": COLORS["ink"], "fmt": "o", "markersize": 4, "capsize": 3, "linewidth": 1}
        axes.errorbar([row["eps"] for row in rows], values, spread, **style, label="confirmed")
        axes.set_xticks([row["eps"] for row in rows], [row["eps_text"] for row in rows])
        axes.set_xlabel("eps")
        axes.set_ylabel("robust accuracy, %")
        add_legend(axes, fontsize=8)
        style_axes(axes)
    return Picture("curve", figure, found["sentence"])
