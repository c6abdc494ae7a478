"""Figures of an audit: bars of accuracies, bars of classes, gains of steps, and example images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np

from vitadel.quantities import interval_text, percent, shorten
from vitadel.reporting.figures import COLORS, WIDTH, Picture, new_figure
from vitadel.reporting.read_runs import Run, aspects, run_labels, threat_text
from vitadel.statistics import wilson

_ROW = 20  # points, as are all lengths below
_MOST_CLASSES = 20
_FEWEST_PER_CLASS = 10  # with fewer, the interval of a share is wider than 50 points
_MOST_RUNS_WITH_ATTACKS = 6  # beyond, the figure would be too crowded
_SMALL_IMAGE = 96  # up to this many pixels, eight examples fit beside each other
_MOST_PANELS = 4
_LINEAR = 1e-3  # of the scales around zero
_SIDE, _GAP, _TOP, _BOTTOM = 140, 30, 26, 40  # of a panel of gains

GAINS_CAPTION = (
    "Each point is an image: the mean gain that the gradient promised for a step, and the mean gain that the step "
    "delivered, both relative to the largest promise, on scales that are logarithmic except near zero. The line is a "
    "model that keeps its promises: honest models scatter around it. Points near the zero line or below it are "
    "promises that are not kept: the gradients are masked."
)


def _percent_axes(figure: Any, left: float, right: float, top: float, bottom: float) -> Any:
    """Axes from 0 to 100 % across; down, one unit is one point."""
    height = figure.get_figheight() * 72
    inner = height - top - bottom
    box = (left / WIDTH, bottom / height, (WIDTH - left - right) / WIDTH, inner / height)
    axes = figure.add_axes(box, xlim=(0, 1), ylim=(inner, 0))
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    axes.tick_params(axis="x", length=0, labelcolor=COLORS["muted"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _rule(axes: Any, top: float, bottom: float) -> None:
    """Lines to read the bars by, without crossing the words above them."""
    axes.vlines([0, 0.25, 0.5, 0.75, 1], top, bottom, color=COLORS["grid"], linewidth=0.8, zorder=0, clip_on=False)


def _write(axes: Any, x: float, y: float, text: str, *, color: str = "ink", side: str = "left", **more: Any) -> None:
    """Text beside the axes: x in points from their left edge (or, negative side 'right', ending there)."""
    axes.annotate(
        text,
        xy=(0, y),
        xycoords=("axes fraction", "data"),
        xytext=(x, 0),
        textcoords="offset points",
        ha=side,
        va="center_baseline",
        color=COLORS[color],
        annotation_clip=False,
        parse_math=False,  # a dollar sign in a class name is a dollar sign
        **more,
    )


def _bar(axes: Any, y: float, value: float, height: float, color: str) -> None:
    axes.barh(y, value, height=height, color=COLORS[color], linewidth=0)


def _whisker(axes: Any, y: float, interval: Sequence[float], size: float = 3.5) -> None:
    """An interval with its two ends, in one stroke."""
    low, high = interval
    across, down = [low, low, low, high, high, high], [y - size, y + size, y, y, y - size, y + size]
    axes.plot(across, down, color=COLORS["ink"], linewidth=1.1, clip_on=False, solid_capstyle="butt")


@dataclass(frozen=True)
class _Bar:
    label: str
    value: float
    interval: Sequence[float]
    color: str


@dataclass(frozen=True)
class _Group:
    title: str
    conditions: str
    bars: list[_Bar] = field(default_factory=list)


def _group(run: Run, label: str, with_attacks: bool) -> _Group:
    clean, worst = run.results.get("clean"), run.results.get("worst_case")
    known = aspects(run)
    facts = [known["data"], threat_text(run) if run.attacks else "", f"n = {known['n']}" if known["n"] else ""]
    facts += [f"seed {run.results['seed']}"] if "seed" in run.results else []
    bars = [_Bar("clean", clean["accuracy"], clean["ci95"], "clean")] if clean else []
    if with_attacks:
        bars += [_Bar(e["name"], e["robust_accuracy"], e["ci95"], "attack") for e in run.attacks]
    if worst:
        bars.append(_Bar("worst case", worst["robust_accuracy"], worst["ci95"], "worst"))
    if not run.complete:
        facts.append("not finished")
    return _Group(label, ", ".join(filter(None, facts)), bars)


def draw_accuracies(runs: Sequence[Run]) -> Picture | None:
    """None if no run has a number yet."""
    with_attacks = len(runs) <= _MOST_RUNS_WITH_ATTACKS
    drafts = [_group(run, label, with_attacks) for run, label in zip(runs, run_labels(runs), strict=True)]
    groups = [draft for draft in drafts if draft.bars]
    if not groups:
        return None
    bars = [bar for group in groups for bar in group.bars]
    left = min(max(70, 6.2 * max(len(shorten(bar.label, 34)) for bar in bars) + 12), 230)
    head, gap = 40, 16
    inner = sum(head + _ROW * len(group.bars) for group in groups) + gap * (len(groups) - 1) + 6
    with new_figure(inner + 34) as figure:
        axes = _percent_axes(figure, left, right=150, top=4, bottom=30)
        y: float = 0
        for group in groups:
            _write(axes, -left + 4, y + 10, shorten(group.title, 76), fontweight="bold", fontsize=11)
            _write(axes, -left + 4, y + 25, shorten(group.conditions, 110), color="muted", fontsize=9)
            y += head
            _rule(axes, y - 2, y + _ROW * len(group.bars) + 2)
            for bar in group.bars:
                _draw_bar(axes, y + _ROW / 2, bar)
                y += _ROW
            y += gap
        axes.set_xlabel("accuracy with 95 % interval", color=COLORS["muted"], fontsize=9, labelpad=3)
    spoken = "; ".join(
        f"{group.title} ({group.conditions}): "
        + ", ".join(f"{bar.label} {percent(bar.value)} (interval {interval_text(bar.interval)})" for bar in group.bars)
        for group in groups
    )
    return Picture("accuracy", figure, f"Bar chart of accuracies with 95 % intervals. {spoken}.")


def _draw_bar(axes: Any, y: float, bar: _Bar) -> None:
    strong = {"fontweight": "bold"} if bar.color == "worst" else {}
    _write(axes, -8, y, shorten(bar.label, 34), side="right", **strong)
    _bar(axes, y, bar.value, 12, bar.color)
    _whisker(axes, y, bar.interval)
    across = axes.get_position().width * WIDTH
    _write(axes, across + 58, y, percent(bar.value), side="right", **strong)
    _write(axes, across + 66, y, interval_text(bar.interval), color="muted", fontsize=9)


@dataclass(frozen=True)
class ClassScore:
    """Counts of one class: of `n` samples, how many are correct when clean, after each attack, and after all."""

    name: str
    n: int
    correct: int
    held: int | None
    attacked: tuple[tuple[str, int], ...] = ()


def class_scores(run: Run) -> list[ClassScore]:
    """Every class that occurs, in the order of labels; none where clean images were not classified."""
    if run.samples is None or run.results.get("clean") is None:
        return []
    label, correct, held = run.column("label"), run.column("clean_correct"), run.held()
    columns = [name for name in run.samples.column_names if name.startswith("held:")]
    after_others = {entry["name"] for entry in run.attacks[1:] if str(entry.get("counts")).startswith("after")}
    names = [column.removeprefix("held:") for column in columns]
    titles = [f"up to {name}" if name in after_others else name for name in names]
    present, place = np.unique(label, return_inverse=True)

    def counts(which: np.ndarray) -> list[int]:
        """How many samples of each class it holds for; one pass, as there may be a million samples in 1,000 classes."""
        found: list[int] = np.bincount(place[which], minlength=len(present)).tolist()
        return found

    total, right = counts(np.full(len(label), True)), counts(correct)
    robust = None if held is None else counts(held)
    by_attack = [counts(run.column(column)) for column in columns]
    return [
        ClassScore(
            name=run.class_name(int(value)),
            n=total[row],
            correct=right[row],
            held=None if robust is None else robust[row],
            attacked=tuple((title, found[row]) for title, found in zip(titles, by_attack, strict=True)),
        )
        for row, value in enumerate(present)
    ]


def extreme_classes(scores: Sequence[ClassScore]) -> tuple[list[ClassScore], list[ClassScore]]:
    """All classes, best first, and nothing; of more than twenty the ten best and the ten worst."""

    def rank(score: ClassScore) -> tuple[float, float]:
        held = score.correct if score.held is None else score.held
        return (-held / score.n, -score.correct / score.n)

    ordered = sorted(scores, key=rank)
    half = _MOST_CLASSES // 2
    return (ordered, []) if len(ordered) <= _MOST_CLASSES else (ordered[:half], ordered[-half:])


def enough_per_class(run: Run) -> bool:
    """Whether most classes have so many images that a bar says something."""
    counts = sorted(score.n for score in class_scores(run))
    return bool(counts) and counts[len(counts) // 2] >= _FEWEST_PER_CLASS


def draw_classes(run: Run) -> Picture | None:
    """Clean and worst-case accuracy per class; None without samples, or with too few of each class."""
    if not enough_per_class(run):
        return None
    scores = class_scores(run)
    best, rest = extreme_classes(scores)
    shown = [*best, *rest]
    attacked = shown[0].held is not None
    left = min(max(70, 6.2 * max(len(shorten(score.name, 30)) for score in shown) + 48), 230)
    inner = 26 + _ROW * (len(shown) + bool(rest)) + 4
    with new_figure(inner + 34) as figure:
        axes = _percent_axes(figure, left, right=120, top=4, bottom=30)
        _legend(axes, [("clean", "clean"), ("worst", "worst case, with 95 % interval")] if attacked else [])
        y: float = 26
        _rule(axes, y - 2, inner)
        for score in best:
            _draw_class(axes, y + _ROW / 2, score)
            y += _ROW
        if rest:
            between = len(scores) - len(shown)
            _write(axes, -left + 4, y + _ROW / 2, f"… {between} classes in between …", color="muted", fontsize=9)
            y += _ROW
        for score in rest:
            _draw_class(axes, y + _ROW / 2, score)
            y += _ROW
        axes.set_xlabel("accuracy", color=COLORS["muted"], fontsize=9, labelpad=3)
    spoken = "; ".join(f"{score.name}: {_class_text(score)} of {score.n}" for score in shown)
    return Picture("classes", figure, f"Bar chart of accuracy per class, clean and worst case. {spoken}.")


def _legend(axes: Any, entries: Sequence[tuple[str, str]]) -> None:
    x = 0.0
    for color, text in entries:
        _write(axes, x, 10, "■", color=color, fontsize=11)
        _write(axes, x + 14, 10, text, color="muted", fontsize=9)
        x += 34 + 5.4 * len(text)


def _class_text(score: ClassScore) -> str:
    clean = percent(score.correct / score.n)
    return clean if score.held is None else f"{clean}, worst case {percent(score.held / score.n)}"


def _draw_class(axes: Any, y: float, score: ClassScore) -> None:
    _write(axes, -42, y, shorten(score.name, 30), side="right")
    _write(axes, -8, y, f"{score.n:,}", color="muted", side="right", fontsize=8)
    _bar(axes, y - 3.5, score.correct / score.n, 6, "clean")
    if score.held is not None:
        _bar(axes, y + 3.5, score.held / score.n, 6, "worst")
        _whisker(axes, y + 3.5, wilson(score.held, score.n), size=2.5)
    across = axes.get_position().width * WIDTH
    _write(axes, across + 54, y, percent(score.correct / score.n), side="right", fontsize=9)
    if score.held is not None:
        _write(axes, across + 58, y, "→", color="muted", fontsize=9)
        _write(axes, across + 108, y, percent(score.held / score.n), side="right", fontsize=9)


def draw_examples(run: Run) -> Picture | None:
    """Clean images, perturbations, perturbed images, and the attention on both; None without examples."""
    if run.examples is None or len(run.examples["x"]) == 0:
        return None
    columns = 8 if max(run.examples["x"].shape[2:]) <= _SMALL_IMAGE else 4
    shown = {name: array[:columns] for name, array in run.examples.items() if array.ndim}
    x, z = (np.nan_to_num(shown[name].astype(np.float64)).transpose(0, 2, 3, 1) for name in ("x", "z"))
    factor = _gray_factor(z - x)
    rows = {"clean": x, f"perturbation\n× {factor:g}\naround gray": 0.5 + factor * (z - x), "perturbed": z}
    answers = zip(shown["label"].tolist(), shown["prediction"].tolist(), strict=True)
    captions = [(run.class_name(label), run.class_name(answer), label == answer) for label, answer in answers]
    outcomes = [f"{label} {'stays' if held else 'becomes'} {seen}" for label, seen, held in captions]
    alt = f"Example images: clean, perturbation enlarged {factor:g} times around gray, perturbed"
    maps = _attention(shown)
    if maps is not None:
        before, after = maps
        largest = np.maximum(before, after).max((1, 2), keepdims=True)  # one scale for both, so that they compare
        rows["attention,\nclean"] = _overlaid(x, before / largest)
        rows["attention,\nperturbed"] = _overlaid(z, after / largest)
        moved = np.abs(after - before).sum((1, 2)) / 2
        outcomes = [
            f"{text}, {percent(float(share))} of its attention moves"
            for text, share in zip(outcomes, moved, strict=True)
        ]
        alt += ", and the last layer's attention over the patches of the clean and of the perturbed image"
    return Picture("examples", _grid(rows, captions, columns), f"{alt}. {'; '.join(outcomes)}.")


def shows_attention(run: Run) -> bool:
    """Whether its examples have maps that can be drawn."""
    return run.examples is not None and _attention(run.examples) is not None


def _attention(shown: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Maps (n, rows, columns) of clean and perturbed images that sum to 1; older runs and other models have none."""
    if not {"attention_x", "attention_z"} <= shown.keys():
        return None
    maps = [np.nan_to_num(shown[name].astype(np.float64)) for name in ("attention_x", "attention_z")]
    fitting = all(each.ndim == 3 and each.shape == maps[0].shape and each.size for each in maps)
    if not fitting or len(maps[0]) != len(shown["x"]) or min(each.min() for each in maps) < 0:
        return None
    before, after = (each / np.maximum(each.sum((1, 2), keepdims=True), 1e-30) for each in maps)
    return before, after


def _overlaid(images: Any, shares: Any) -> Any:
    """The images in gray under the colors of their maps: the brighter, the more attention."""
    tall, wide = images.shape[1:3]
    rows, columns = (np.arange(size) * kept // size for size, kept in zip((tall, wide), shares.shape[1:], strict=True))
    colors = matplotlib.colormaps["inferno"](shares[:, rows][:, :, columns])[..., :3]
    return 0.4 * np.clip(images, 0, 1).mean(3, keepdims=True) + 0.6 * colors


def _gray_factor(difference: Any) -> float:
    """Three digits, rounded down, so that the largest difference just reaches black or white."""
    largest = float(np.abs(difference).max(initial=0.0))
    if largest == 0:
        return 1.0
    factor = 0.5 / largest
    unit = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return float(f"{math.floor(factor / unit + 1e-9) * unit:.6g}")


def _grid(rows: Mapping[str, Any], captions: Sequence[tuple[str, str, bool]], columns: int) -> Any:
    left, gap, head, foot = 78, 6, 20, 36
    side = (WIDTH - left) / columns - gap
    tall, wide = next(iter(rows.values())).shape[1:3]
    cell = side * tall / wide
    height = head + len(rows) * (cell + gap) + foot
    with new_figure(height) as figure:
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0), autoscale_on=False)
        axes.set_axis_off()
        style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 9, "parse_math": False}
        for row, (name, images) in enumerate(rows.items()):
            top = head + row * (cell + gap)
            axes.text(4, top + cell / 2, name, color=COLORS["muted"], ha="left", va="center", fontsize=9)
            for column, image in enumerate(np.clip(images, 0, 1)):
                start = left + column * (side + gap)
                box = (start, start + side, top + cell, top)
                axes.imshow(image, interpolation="none", aspect="auto", extent=box, clip_on=False)
        letters = int(side / 6.2)
        for column, (label, seen, held) in enumerate(captions):
            middle = left + column * (side + gap) + side / 2
            seen_style = {**style, "color": COLORS["ink" if held else "worst"], "fontweight": "bold"}
            mark = "✓ robust" if held else "✗ fooled"
            axes.text(middle, head / 2, shorten(label, letters), color=COLORS["ink"], **style)
            axes.text(middle, height - foot + 8, shorten(seen, letters), **seen_style)
            axes.text(middle, height - foot + 24, mark, color=COLORS["muted"], **style)
    return figure


def draw_gains(entries: Sequence[Mapping[str, Any]]) -> Picture:
    """What steps delivered against what gradients promised, one panel for each of the first attacks with points."""
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
