"""How a training went, as curves: the loss, and accuracy on held-out images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.read_runs import Run, percent, run_labels

__all__ = ["draw_training", "draw_trainings", "plain_axes", "training_rows"]

_ACCURACIES = {"validation_clean": ("clean", "clean"), "validation_robust": ("worst", "under attack")}
_STYLES = {"validation_clean": "--", "validation_robust": "-"}  # where colours tell trainings apart
_COSINES = {
    "validation_cosine_clean": ("clean", "clean"),
    "validation_cosine_robust": ("worst", "under attack"),
}
_MOST_CURVES = 6  # side by side; more would hide each other
_LAST = 20  # steps, whose mean loss is told, as in the paper's figure 4 of Robustness Tokens


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
        cosines = _measures_cosines(run)
        for name, (color, label) in (_COSINES if cosines else _ACCURACIES).items():
            seen = [(row["step"], row[name] if cosines else 100 * row[name]) for row in epochs if name in row]
            if seen:
                accuracy.plot(*zip(*seen, strict=True), color=COLOURS[color], marker="o", markersize=3, label=label)
        if cosines:
            accuracy.set(ylim=(None, 1), ylabel="held out, cosine", xlabel="step")
        else:
            accuracy.set(ylim=(0, 100), ylabel="held out, %", xlabel="step")
        if accuracy.lines:
            accuracy.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"])
        for axes in (loss, accuracy):
            plain_axes(axes)
    told = [f"{label} {number}" for label, number in _after_the_last_epoch(run)]
    what = "cosines on" if _measures_cosines(run) else "on"
    after = f" After the last epoch, {what} held-out images: {', '.join(told)}." if told else ""
    spoken = f"Curves of a training of {len(steps)} steps: the loss goes from {steps[0]['loss']:.3f} to "
    return Picture("training", figure, f"{spoken}{steps[-1]['loss']:.3f}.{after}")


def training_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Trainings side by side: what was changed by the recipe's row, the loss at first and at last, held-out scores."""
    found = []
    for run, label, recipe in zip(runs, run_labels(runs), _recipes(runs), strict=True):
        losses = [row["loss"] for row in run.metrics if "loss" in row]
        if not losses:
            continue
        scores = ", ".join(f"{name} {number}" for name, number in _after_the_last_epoch(run))
        found.append(
            {
                "label": label,
                "recipe": recipe or label,
                "steps": str(len(losses)),
                "first": f"{losses[0]:.3f}",
                "last": f"{_mean(losses[-_LAST:]):.3f}",
                "measure": "cosine" if _measures_cosines(run) else "accuracy",
                "scores": scores or "not measured",
            }
        )
    return found


def draw_trainings(runs: Sequence[Run]) -> Picture | None:
    """Several trainings in one figure: the losses, each step the mean of the last few, and below them accuracy on
    held-out images, where all of them have it. None if there are too many."""
    trained = [(run, row["recipe"]) for run, row in zip(_trainings(runs), training_rows(runs), strict=True)]
    if not 2 <= len(trained) <= _MOST_CURVES:
        return None
    judged = all(any(name in row for row in run.metrics for name in _ACCURACIES) for run, _ in trained)
    with our_style():
        figure = blank(420 if judged else 240)
        axes = figure.add_axes((0.08, 0.54, 0.88, 0.43) if judged else (0.08, 0.17, 0.88, 0.77))
        below: Any = figure.add_axes((0.08, 0.10, 0.88, 0.38), sharex=axes) if judged else None
        for (run, recipe), color in zip(trained, ("clean", "attack", "worst", "ink", "muted", "grid"), strict=False):
            losses = [row["loss"] for row in run.metrics if "loss" in row]
            smooth = [_mean(losses[max(0, end - _LAST) : end]) for end in range(1, len(losses) + 1)]
            axes.plot(range(1, len(losses) + 1), smooth, color=COLOURS[color], linewidth=1.5, label=recipe)
            for name, style in _STYLES.items() if below is not None else ():
                seen = [(row["step"], 100 * row[name]) for row in run.metrics if name in row]
                if seen:
                    below.plot(*zip(*seen, strict=True), style, color=COLOURS[color], marker="o", markersize=3)
        axes.set(xlabel="" if judged else "step", ylabel=f"loss, mean of {_LAST} steps")
        axes.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"])
        plain_axes(axes)
        if below is not None:
            axes.tick_params(labelbottom=False)
            for name, style in _STYLES.items():
                below.plot([], [], style, color=COLOURS["muted"], label=_ACCURACIES[name][1])
            below.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"])
            below.set(ylim=(0, 100), xlabel="step", ylabel="held out, %")
            plain_axes(below)
    told = "; ".join(f"{row['recipe']}: {row['first']} to {row['last']}" for row in training_rows(runs))
    return Picture("trainings", figure, f"Losses of {len(trained)} trainings, first step to last: {told}.")


def _recipes(runs: Sequence[Run]) -> list[str]:
    """By which recipe each was trained, with its folder where one made several; '' where that is not known."""
    names = [str((run.results.get("training") or {}).get("recipe") or "") for run in runs]
    several = {name for name in names if name and names.count(name) > 1}
    return [f"{name} ({run.folder})" if name in several else name for name, run in zip(names, runs, strict=True)]


def _trainings(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if any("loss" in row for row in run.metrics)]


def _measures_cosines(run: Run) -> bool:
    return any(name in row for row in run.metrics for name in _COSINES)


def _after_the_last_epoch(run: Run) -> list[tuple[str, str]]:
    curves = _COSINES if _measures_cosines(run) else _ACCURACIES
    last = next((row for row in reversed(run.metrics) if next(iter(curves)) in row), {})
    tell = "{:.3f}".format if curves is _COSINES else percent
    return [(label, tell(last[name])) for name, (_, label) in curves.items() if name in last]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def plain_axes(axes: Any) -> None:
    """Two thin lines and quiet numbers: the curves are what is looked at."""
    axes.tick_params(labelcolor=COLOURS["muted"], color=COLOURS["grid"], labelsize=9)
    axes.xaxis.label.set_color(COLOURS["muted"])
    axes.yaxis.label.set_color(COLOURS["muted"])
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(COLOURS["grid"])
