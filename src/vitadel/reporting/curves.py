"""How a training went, as curves: the loss, and accuracy on held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.gather import Run, percent

__all__ = ["draw_training"]

_CURVES = {"validation_clean": ("clean", "clean"), "validation_robust": ("worst", "under attack")}


def draw_training(run: Run) -> Picture | None:
    """None for a run that is no training, or has not finished a step."""
    steps = [row for row in run.metrics if "loss" in row]
    epochs = [row for row in run.metrics if "epoch" in row]
    if not steps:
        return None
    with our_style():
        figure = blank(300)
        loss = figure.add_axes((0.08, 0.57, 0.88, 0.38))
        accuracy = figure.add_axes((0.08, 0.12, 0.88, 0.35), sharex=loss)
        xs = [row["step"] for row in steps]
        loss.plot(xs, [row["loss"] for row in steps], color=COLOURS["grid"], linewidth=0.8)
        bounds = [0.0, *(row["step"] for row in epochs)]
        means = [_mean([row["loss"] for row in steps if low < row["step"] <= high]) for low, high in pairwise(bounds)]
        loss.plot(bounds[1:], means, color=COLOURS["ink"], linewidth=1.5, marker="o", markersize=3)
        loss.set_ylabel("loss")
        loss.tick_params(labelbottom=False)
        for name, (colour, label) in _CURVES.items():
            seen = [(row["step"], 100 * row[name]) for row in epochs if name in row]
            if seen:
                accuracy.plot(*zip(*seen, strict=True), color=COLOURS[colour], marker="o", markersize=3, label=label)
        accuracy.set(ylim=(0, 100), ylabel="held out, %", xlabel="step")
        if accuracy.lines:
            accuracy.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"])
        for axes in (loss, accuracy):
            _plain(axes)
    last = next((row for row in reversed(epochs) if "validation_clean" in row), {})
    told = [f"{label} {percent(last[name])}" for name, (_, label) in _CURVES.items() if name in last]
    after = f" After the last epoch, on held-out images: {', '.join(told)}." if told else ""
    spoken = f"Curves of a training of {len(steps)} steps: the loss goes from {steps[0]['loss']:.3f} to "
    return Picture("training", figure, f"{spoken}{steps[-1]['loss']:.3f}.{after}")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _plain(axes: Any) -> None:
    axes.tick_params(labelcolor=COLOURS["muted"], color=COLOURS["grid"], labelsize=9)
    axes.xaxis.label.set_color(COLOURS["muted"])
    axes.yaxis.label.set_color(COLOURS["muted"])
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(COLOURS["grid"])
