"""Trainings: loss and accuracy on held-out images as curves, and the audit of the best epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.markup import escape

from vitadel.quantities import percent
from vitadel.reporting.figures import COLORS, Picture, add_legend, new_figure, style_axes
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.kinds.audit import audit_sections, audit_sentence, show_audit
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table
from vitadel.reporting.terminal import show_effective_eps, show_findings

_ACCURACIES = {"validation_clean": ("clean", "clean"), "validation_robust": ("worst", "under attack")}
_STYLES = {"validation_clean": "--", "validation_robust": "-"}  # where colors distinguish trainings
_COSINES = {
    "validation_cosine_clean": ("clean", "clean"),
    "validation_cosine_robust": ("worst", "under attack"),
}
_TERMS = {  # of the loss of Robustness Tokens, and without the tokens
    "invariance": ("clean", "clean images, with the tokens"),
    "recovery": ("worst", "attacked images, with the tokens"),
    "regular": ("muted", "attacked images, without tokens"),
}
_MOST_CURVES = 6  # in one figure; more would hide each other
_LAST = 20  # steps, whose mean loss is shown, as in figure 4 of the Robustness Tokens paper


def draw_training(run: Run) -> Picture:
    """The loss of every step and its mean over epochs; below, scores of held-out images."""
    steps = [row for row in run.metrics if "loss" in row]
    epochs = [row for row in run.metrics if "epoch" in row]
    cosines = _measures_cosines(run)
    with new_figure(300) as figure:
        loss = figure.add_axes((0.08, 0.57, 0.88, 0.38))
        scores = figure.add_axes((0.08, 0.12, 0.88, 0.35), sharex=loss)
        loss.plot([row["step"] for row in steps], _losses(run), color=COLORS["grid"], linewidth=0.8)
        bounds = [0.0, *(row["step"] for row in epochs)]
        means = [_mean([row["loss"] for row in steps if low < row["step"] <= high]) for low, high in pairwise(bounds)]
        loss.plot(bounds[1:], means, color=COLORS["ink"], linewidth=1.5, marker="o", markersize=3)
        loss.set_ylabel("loss")
        loss.tick_params(labelbottom=False)
        for name, (color, label) in (_COSINES if cosines else _ACCURACIES).items():
            seen = [(row["step"], row[name] if cosines else 100 * row[name]) for row in epochs if name in row]
            if seen:
                scores.plot(*zip(*seen, strict=True), color=COLORS[color], marker="o", markersize=3, label=label)
        limits: dict[str, Any] = {"ylim": (None, 1), "ylabel": "held out, cosine"}
        scores.set(xlabel="step", **(limits if cosines else {"ylim": (0, 100), "ylabel": "held out, %"}))
        if scores.lines:
            add_legend(scores)
        for axes in (loss, scores):
            style_axes(axes)
    held_out = _last_scores(run)
    what = "cosines on" if cosines else "on"
    after = f" After the last epoch, {what} held-out images: {held_out}." if held_out else ""
    spoken = f"Curves of a training of {len(steps)} steps: the loss goes from {steps[0]['loss']:.3f} to "
    return Picture("training", figure, f"{spoken}{steps[-1]['loss']:.3f}.{after}")


def draw_terms(run: Run) -> Picture:
    """The cosines of a token training in every step, and their means over the last steps."""
    steps, texts = [row for row in run.metrics if "recovery" in row], []
    with new_figure(240) as figure:
        axes = figure.add_axes((0.08, 0.17, 0.88, 0.77))
        for name, (color, label) in _TERMS.items():
            seen = [(row["step"], row[name]) for row in steps if name in row]
            if not seen:
                continue
            places, values = zip(*seen, strict=True)
            smooth = [_mean(values[max(0, end - _LAST) : end]) for end in range(1, len(values) + 1)]
            axes.plot(places, values, color=COLORS[color], linewidth=0.6, alpha=0.4)
            axes.plot(places, smooth, color=COLORS[color], linewidth=1.5, label=label)
            texts.append(f"{label}: {values[0]:.3f} to {smooth[-1]:.3f}")
        axes.set(xlabel="step", ylabel="cosine")
        add_legend(axes)
        style_axes(axes)
    return Picture("terms", figure, f"Cosines with clean features without tokens, first to last: {'; '.join(texts)}.")


def compare_trainings(runs: Mapping[str, Run]) -> Section | None:
    """Several trainings, such as the rows of one recipe: their losses and scores of held-out images."""
    trained = {label: run for label, run in runs.items() if _losses(run)}
    if len(trained) < 2:
        return None
    names = dict(zip(_recipes(trained), trained.values(), strict=True))
    rows = tuple(
        (
            name,
            len(_losses(run)),
            _losses(run)[0],
            _mean(_losses(run)[-_LAST:]),
            f"{'cosine' if _measures_cosines(run) else 'accuracy'}: {_last_scores(run) or 'not measured'}",
        )
        for name, run in names.items()
    )
    columns = (
        *(Column("training"), Column("steps", 0), Column("loss, first step", 3)),
        *(Column(f"loss, mean of last {_LAST}", 3), Column("held-out images, after the last epoch")),
    )
    return Section(
        "Trainings side by side",
        lambda: _draw_trainings(names) if len(names) <= _MOST_CURVES else None,
        tables=[Table("Losses and scores of held-out images.", columns, rows)],
        remarks=["Losses of different objectives cannot be compared, nor can those under different attacks."],
    )


def _draw_trainings(runs: Mapping[str, Run]) -> Picture:
    """The losses, smoothed over the last steps, and below them accuracy on held-out images, where all runs have it."""
    judged = all(any(name in row for row in run.metrics for name in _ACCURACIES) for run in runs.values())
    with new_figure(420 if judged else 240) as figure:
        axes = figure.add_axes((0.08, 0.54, 0.88, 0.43) if judged else (0.08, 0.17, 0.88, 0.77))
        below: Any = figure.add_axes((0.08, 0.10, 0.88, 0.38), sharex=axes) if judged else None
        colors = ("clean", "attack", "worst", "ink", "muted", "grid")
        for (recipe, run), color in zip(runs.items(), colors, strict=False):
            losses = _losses(run)
            smooth = [_mean(losses[max(0, end - _LAST) : end]) for end in range(1, len(losses) + 1)]
            axes.plot(range(1, len(losses) + 1), smooth, color=COLORS[color], linewidth=1.5, label=recipe)
            for name, style in _STYLES.items() if judged else ():
                seen = [(row["step"], 100 * row[name]) for row in run.metrics if name in row]
                if seen:
                    below.plot(*zip(*seen, strict=True), style, color=COLORS[color], marker="o", markersize=3)
        axes.set(xlabel="" if judged else "step", ylabel=f"loss, mean of {_LAST} steps")
        add_legend(axes)
        style_axes(axes)
        if judged:
            axes.tick_params(labelbottom=False)
            for name, style in _STYLES.items():
                below.plot([], [], style, color=COLORS["muted"], label=_ACCURACIES[name][1])
            add_legend(below)
            below.set(ylim=(0, 100), xlabel="step", ylabel="held out, %")
            style_axes(below)
    spoken = "; ".join(
        f"{name}: {_losses(run)[0]:.3f} to {_mean(_losses(run)[-_LAST:]):.3f}" for name, run in runs.items()
    )
    return Picture("trainings", figure, f"Losses of {len(runs)} trainings, first step to last: {spoken}.")


def _recipes(runs: Mapping[str, Run]) -> list[str]:
    """The recipe of each, with its folder where several runs have the same; the label where it is not known."""
    names = {label: str((run.results.get("training") or {}).get("recipe") or "") for label, run in runs.items()}
    several = {name for name in names.values() if list(names.values()).count(name) > 1}
    return [
        f"{name} ({runs[label].folder})" if name and name in several else name or label for label, name in names.items()
    ]


def _losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics if "loss" in row]


def _measures_cosines(run: Run) -> bool:
    return any(name in row for row in run.metrics for name in _COSINES)


def _last_scores(run: Run) -> str:
    """Scores of held-out images after the last epoch that has them."""
    curves = _COSINES if _measures_cosines(run) else _ACCURACIES
    last = next((row for row in reversed(run.metrics) if next(iter(curves)) in row), {})
    write = "{:.3f}".format if curves is _COSINES else percent
    return ", ".join(f"{label} {write(last[name])}" for name, (_, label) in curves.items() if name in last)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _sections(run: Run) -> list[Section]:
    training = run.results.get("training") or {}
    if (training.get("held_out") or {}).get("measure") == "cosine":
        scores = (
            "the cosine of features with the token-free clean ones, on held-out training images, clean and as the mean "
            "with attacked ones"
        )
    else:
        scores = "accuracy on held-out training images, clean and attacked at full eps"
    caption = f"Above, the loss of every step and its mean over the epoch. Below, {scores}: the epoch with the best "
    caption += "score is kept and audited."
    if training.get("stopped"):
        caption += f" Stopped early: {training['stopped']}."
    own = [Section("Training", lambda: draw_training(run), caption)] if _losses(run) else []
    if any("recovery" in row for row in run.metrics):
        said = (
            "Cosines with the clean features of the model without tokens: every batch, and the mean of the last "
            f"{_LAST}. As in figure 5 of the Robustness Tokens paper."
        )
        own.append(Section("Both terms of the loss", lambda: draw_terms(run), said))
    return [*audit_sections(run), *own]


def show_training(run: Run) -> None:
    """Where a training ended, and the audit of its best epoch."""
    console, training = Console(), run.results["training"]
    if training["stopped"]:
        console.print(f"[yellow]stopped early:[/] {escape(training['stopped'])}")
    held_out = training["held_out"]
    if held_out is not None:
        write = percent if held_out["measure"] == "accuracy" else "{:.3f}".format
        robust = "" if held_out["robust"] is None else f", robust {write(held_out['robust'])}"
        console.print(
            f"{escape(training['recipe'])}: {training['steps']} steps of {training['images_per_step']} images; "
            f"best was epoch {training['best_epoch'] + 1} of {training['epochs']} "
            f"({held_out['measure']} of held-out images, n = {held_out['n']}: clean {write(held_out['clean'])}{robust})"
        )
    show_effective_eps("attack in training", training.get("attack") or {}, console)
    if "clean" in run.results:
        show_audit(run)
    else:
        console.print("[dim]The recipe names no test data, so nothing was audited.[/]")
        show_findings(run.results.get("findings") or [])


KIND = Kind(audit_sentence, _sections, compare_trainings, show=show_training, partial=True)
