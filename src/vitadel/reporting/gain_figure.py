"""The figure of what an attack's steps delivered against what gradients promised, one panel per attack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitadel.reporting.figures import COLORS, WIDTH, Picture, new_figure
from vitadel.reporting.text import shorten

CAPTION = (
    "Each point is an image: the mean gain that the gradient promised for a step, and the mean gain that the step "
    "delivered, both relative to the largest promise, on scales that are logarithmic except near zero. The line is a "
    "model that keeps its promises: honest models scatter around it. Points near the zero line or below it are "
    "promises that are not kept: the gradients are masked."
)
_MOST_PANELS = 4
_LINEAR = 1e-3
_SIDE, _GAP, _TOP, _BOTTOM = 140, 30, 26, 40  # points


def draw_gains(entries: Sequence[Mapping[str, Any]]) -> Picture:
    """Panels of the first attacks that have points."""
    shown = entries[:_MOST_PANELS]
    height = _TOP + _SIDE + _BOTTOM
    spoken = []
    with new_figure(height) as figure:
        for column, entry in enumerate(shown):
            left = 40 + column * (_SIDE + _GAP)
            box = (left / WIDTH, _BOTTOM / height, _SIDE / WIDTH, _SIDE / height)
            axes = figure.add_axes(box, xlim=(0, _scaled(3.0)), ylim=(_scaled(-3.0), _scaled(10.0)))
            points = np.asarray(entry["gains"]["points"], dtype=np.float64)
            largest = max(float(points[:, 0].max()), 1e-30)
            promised, delivered = _scaled(points[:, 0] / largest), _scaled(np.clip(points[:, 1] / largest, -3.0, 10.0))
            axes.plot([0, _scaled(3.0)], [0, _scaled(3.0)], color=COLORS["muted"], linewidth=1)
            axes.axhline(0, color=COLORS["grid"], linewidth=0.8, zorder=0)
            axes.plot(promised, delivered, "o", color=COLORS["attack"], markersize=3, alpha=0.6, markeredgewidth=0)
            axes.set_title(shorten(entry["name"], 24), fontsize=9, color=COLORS["ink"])
            ticks = (0.0, 0.01, 0.1, 1.0)
            axes.set_xticks(_scaled(ticks), [f"{tick:g}" for tick in ticks])
            axes.set_yticks(_scaled((-1.0, *ticks)), [f"{tick:g}" if column == 0 else "" for tick in (-1.0, *ticks)])
            axes.tick_params(length=0, labelcolor=COLORS["muted"], labelsize=8)
            axes.set_xlabel("promised", color=COLORS["muted"], fontsize=9)
            if column == 0:
                axes.set_ylabel("delivered", color=COLORS["muted"], fontsize=9)
            for spine in axes.spines.values():
                spine.set_color(COLORS["grid"])
            ratio = float(np.median(points[:, 1] / np.maximum(points[:, 0], 1e-30)))
            spoken.append(f"{entry['name']}: the median image delivers {ratio:.2f} times the promise")
    alt = f"Scatter plots of delivered against promised gains of steps, one per attack. {'; '.join(spoken)}."
    return Picture("gains", figure, alt)


def _scaled(values: Any) -> Any:
    """Logarithmic for sizes above a thousandth, linear around zero."""
    return np.sign(values) * np.log1p(np.abs(values) / _LINEAR)
