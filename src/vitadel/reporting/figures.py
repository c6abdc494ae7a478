"""Figures of a report: PNG for files and slides, SVG that takes the colours and fonts of the page around it.

Only matplotlib's object interface is used, so drawing leaves no trace in a notebook that imports this.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from vitadel.evaluation.intervals import wilson
from vitadel.reporting.read_runs import (
    ClassScore,
    Run,
    aspects,
    class_scores,
    interval_text,
    percent,
    run_labels,
    threat_text,
)

__all__ = [
    "COLOURS",
    "Picture",
    "accuracy_figure",
    "blank",
    "draw_accuracies",
    "draw_classes",
    "draw_examples",
    "extreme_classes",
    "our_style",
    "printable",
    "shows_attention",
]

COLOURS = {
    "ink": "#20242c",
    "muted": "#667080",
    "grid": "#dfe3e8",
    "clean": "#6d8fc4",
    "attack": "#d9974a",
    "worst": "#a8353f",
}
"""Light-mode colours. The page sets `--figure-<name>` to others in dark mode; the SVG falls back on these."""

_WIDTH = 700  # points, as are all lengths below
_ROW = 20
_MOST_CLASSES = 20
_MOST_RUNS_WITH_ATTACKS = 6  # beyond, one figure with every attack of every run would be a tapestry
_SMALL_IMAGE = 96  # up to this many pixels, eight examples fit beside each other
_STYLE: dict[str, Any] = {
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "image.composite_image": False,  # or SVG would blend the small images into one large one
    "svg.fonttype": "none",
    "svg.hashsalt": "vitadel",
}

_NO_ORIGIN = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@contextmanager
def our_style() -> Iterator[None]:
    """The same picture whatever the user's matplotlibrc says; glyphs the font lacks are no reason to complain."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# What no XML file may hold.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Picture:
    """A drawn figure with the words that stand in for it."""

    name: str
    figure: Figure
    alt: str

    def png(self) -> bytes:
        return self._saved(format="png", dpi=180, facecolor="white", metadata={"Software": None})

    def svg_file(self) -> bytes:
        """A file to open or to put into a paper."""
        return self._saved(format="svg", metadata={**_NO_ORIGIN, "Description": printable(self.alt)})

    def svg(self, prefix: str) -> str:
        """Markup to stand inside HTML; `prefix` keeps its ids apart from those of other figures on the page."""
        drawn = self._saved(format="svg", transparent=True, metadata=_NO_ORIGIN)
        return _for_page(ElementTree.fromstring(drawn), prefix)

    def _saved(self, **how: Any) -> bytes:
        buffer = io.BytesIO()
        # Names of models and classes may hold anything, and are no formulas; powers on a logarithmic axis are.
        powers = {
            label
            for axes in self.figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            if isinstance(axis.get_major_formatter(), LogFormatter)
            for label in axis.get_ticklabels(which="both")
        }
        for text in self.figure.findobj(Text):
            text.set_text(_ILLEGAL.sub("\ufffd", text.get_text()))
            text.set_parse_math(text in powers)
        with our_style():
            self.figure.savefig(buffer, **how)
        content = buffer.getvalue()
        if how["format"] != "svg":
            return content
        return _ILLEGAL.sub("\ufffd", content.decode("utf-8", "replace")).encode()


def _for_page(root: ElementTree.Element, prefix: str) -> str:
    """Drop what inline SVG does not need, and let the page choose colours and fonts."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        for name in list(element.attrib):
            value = element.attrib.pop(name)
            plain = name.rpartition("}")[2]  # without the XML namespace: `href`, not `xlink:href`
            if plain == "id" and element.tag == "g":
                continue
            if plain == "id":
                value = prefix + value
            elif plain in ("href", "clip-path"):
                value = value.replace("#", f"#{prefix}", 1) if value.startswith(("#", "url(#")) else value
                value = "".join(value.split())  # matplotlib begins the bytes of an image on a new line
            elif plain == "style":
                value = _themed(value)
            element.set(plain, value)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    return ElementTree.tostring(root, encoding="unicode")


def _themed(style: str) -> str:
    kept = [part for part in style.split(";") if not part.strip().startswith("font-family")]
    style = ";".join(kept)
    for name, color in COLOURS.items():
        style = style.replace(color, f"var(--figure-{name}, {color})")
    return style


def printable(text: str) -> str:
    """Without letters that break lines or files."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _shorten(text: str, most: int) -> str:
    """One printable line of at most so many characters; the ends of a long name tell more than its middle."""
    text = printable(text)
    if len(text) <= most:
        return text
    return f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"


def blank(height: float) -> Any:
    figure = Figure(figsize=(_WIDTH / 72, height / 72))
    FigureCanvasAgg(figure)
    return figure


def _percent_axes(figure: Any, left: float, right: float, top: float, bottom: float) -> Any:
    """Axes from 0 to 100 % across; down, one unit is one point."""
    height = figure.get_figheight() * 72
    inner = height - top - bottom
    box = (left / _WIDTH, bottom / height, (_WIDTH - left - right) / _WIDTH, inner / height)
    axes = figure.add_axes(box, xlim=(0, 1), ylim=(inner, 0))
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100 %"])
    axes.tick_params(axis="x", length=0, labelcolor=COLOURS["muted"], labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _rule(axes: Any, top: float, bottom: float) -> None:
    """Lines to read the bars by, without crossing the words above them."""
    axes.vlines([0, 0.25, 0.5, 0.75, 1], top, bottom, color=COLOURS["grid"], linewidth=0.8, zorder=0, clip_on=False)


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
        color=COLOURS[color],
        annotation_clip=False,
        parse_math=False,  # a dollar sign in a class name is a dollar sign
        **more,
    )


def _bar(axes: Any, y: float, value: float, height: float, color: str) -> None:
    axes.barh(y, value, height=height, color=COLOURS[color], linewidth=0)


def _whisker(axes: Any, y: float, interval: Sequence[float], size: float = 3.5) -> None:
    """An interval with its two ends, in one stroke."""
    low, high = interval
    across, down = [low, low, low, high, high, high], [y - size, y + size, y, y, y - size, y + size]
    axes.plot(across, down, color=COLOURS["ink"], linewidth=1.1, clip_on=False, solid_capstyle="butt")


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


def accuracy_figure(runs: Sequence[Run]) -> bytes:
    """Clean accuracy, accuracy under each attack and worst case of every run, with 95 % intervals, as PNG."""
    picture = draw_accuracies(runs)
    if picture is None:
        raise ValueError("accuracy_figure needs at least one run with a clean accuracy in its results")
    return picture.png()


def draw_accuracies(runs: Sequence[Run]) -> Picture | None:
    """None if no run has a number yet."""
    with_attacks = len(runs) <= _MOST_RUNS_WITH_ATTACKS
    drafts = [_group(run, label, with_attacks) for run, label in zip(runs, run_labels(runs), strict=True)]
    groups = [draft for draft in drafts if draft.bars]
    if not groups:
        return None
    bars = [bar for group in groups for bar in group.bars]
    left = min(max(70, 6.2 * max(len(_shorten(bar.label, 34)) for bar in bars) + 12), 230)
    head, gap = 40, 16
    inner = sum(head + _ROW * len(group.bars) for group in groups) + gap * (len(groups) - 1) + 6
    with our_style():
        figure = blank(inner + 34)
        axes = _percent_axes(figure, left, right=150, top=4, bottom=30)
        y: float = 0
        for group in groups:
            _write(axes, -left + 4, y + 10, _shorten(group.title, 76), fontweight="bold", fontsize=11)
            _write(axes, -left + 4, y + 25, _shorten(group.conditions, 110), color="muted", fontsize=9)
            y += head
            _rule(axes, y - 2, y + _ROW * len(group.bars) + 2)
            for bar in group.bars:
                _draw_bar(axes, y + _ROW / 2, bar)
                y += _ROW
            y += gap
        axes.set_xlabel("accuracy with 95 % interval", color=COLOURS["muted"], fontsize=9, labelpad=3)
    spoken = "; ".join(
        f"{group.title} ({group.conditions}): "
        + ", ".join(f"{bar.label} {percent(bar.value)} (interval {interval_text(bar.interval)})" for bar in group.bars)
        for group in groups
    )
    return Picture("accuracy", figure, f"Bar chart of accuracies with 95 % intervals. {spoken}.")


def _draw_bar(axes: Any, y: float, bar: _Bar) -> None:
    strong = {"fontweight": "bold"} if bar.color == "worst" else {}
    _write(axes, -8, y, _shorten(bar.label, 34), side="right", **strong)
    _bar(axes, y, bar.value, 12, bar.color)
    _whisker(axes, y, bar.interval)
    across = axes.get_position().width * _WIDTH
    _write(axes, across + 58, y, percent(bar.value), side="right", **strong)
    _write(axes, across + 66, y, interval_text(bar.interval), color="muted", fontsize=9)


def extreme_classes(scores: Sequence[ClassScore]) -> tuple[list[ClassScore], list[ClassScore]]:
    """All classes, best first, and nothing; of more than twenty the ten best and the ten worst."""

    def standing(score: ClassScore) -> tuple[float, float]:
        held = score.correct if score.held is None else score.held
        return (-held / score.n, -score.correct / score.n)

    ordered = sorted(scores, key=standing)
    half = _MOST_CLASSES // 2
    return (ordered, []) if len(ordered) <= _MOST_CLASSES else (ordered[:half], ordered[-half:])


def draw_classes(run: Run) -> Picture | None:
    """Clean and worst-case accuracy per class; None without samples."""
    scores = class_scores(run)
    if not scores:
        return None
    best, rest = extreme_classes(scores)
    shown = [*best, *rest]
    attacked = shown[0].held is not None
    left = min(max(70, 6.2 * max(len(_shorten(score.name, 30)) for score in shown) + 48), 230)
    inner = 26 + _ROW * (len(shown) + bool(rest)) + 4
    with our_style():
        figure = blank(inner + 34)
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
        axes.set_xlabel("accuracy", color=COLOURS["muted"], fontsize=9, labelpad=3)
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
    _write(axes, -42, y, _shorten(score.name, 30), side="right")
    _write(axes, -8, y, f"{score.n:,}", color="muted", side="right", fontsize=8)
    _bar(axes, y - 3.5, score.correct / score.n, 6, "clean")
    if score.held is not None:
        _bar(axes, y + 3.5, score.held / score.n, 6, "worst")
        _whisker(axes, y + 3.5, wilson(score.held, score.n), size=2.5)
    across = axes.get_position().width * _WIDTH
    _write(axes, across + 54, y, percent(score.correct / score.n), side="right", fontsize=9)
    if score.held is not None:
        _write(axes, across + 58, y, "→", color="muted", fontsize=9)
        _write(axes, across + 108, y, percent(score.held / score.n), side="right", fontsize=9)


def draw_examples(run: Run) -> Picture | None:
    """Clean images, what an attack added, what came out, and where the model looked; None without examples."""
    if run.examples is None or len(run.examples["x"]) == 0:
        return None
    columns = 8 if max(run.examples["x"].shape[2:]) <= _SMALL_IMAGE else 4
    shown = {name: array[:columns] for name, array in run.examples.items() if array.ndim}
    x, z = (np.nan_to_num(shown[name].astype(np.float64)).transpose(0, 2, 3, 1) for name in ("x", "z"))
    factor = _grey_factor(z - x)
    rows = {"clean": x, f"perturbation\n× {factor:g}\naround grey": 0.5 + factor * (z - x), "perturbed": z}
    captions = [(run.class_name(int(a)), run.class_name(int(b)), a == b) for a, b in _pairs(shown)]
    told = [f"{label} {'stays' if held else 'becomes'} {seen}" for label, seen, held in captions]
    alt = f"Example images: clean, perturbation enlarged {factor:g} times around grey, perturbed"
    maps = _attention(shown)
    if maps is not None:
        before, after = maps
        largest = np.maximum(before, after).max((1, 2), keepdims=True)  # one scale for both, so that they compare
        rows["attention,\nclean"] = _overlaid(x, before / largest)
        rows["attention,\nperturbed"] = _overlaid(z, after / largest)
        moved = np.abs(after - before).sum((1, 2)) / 2
        told = [
            f"{text}, {percent(float(share))} of its attention moves" for text, share in zip(told, moved, strict=True)
        ]
        alt += ", and the last layer's attention over the patches of the clean and of the perturbed image"
    with our_style():
        figure = _grid(rows, captions, columns)
    return Picture("examples", figure, f"{alt}. {'; '.join(told)}.")


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
    """The images in grey under the colours of their maps: the brighter, the more attention."""
    tall, wide = images.shape[1:3]
    rows, columns = (np.arange(size) * kept // size for size, kept in zip((tall, wide), shares.shape[1:], strict=True))
    colors = matplotlib.colormaps["inferno"](shares[:, rows][:, :, columns])[..., :3]
    return 0.4 * np.clip(images, 0, 1).mean(3, keepdims=True) + 0.6 * colors


def _pairs(shown: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    return zip(shown["label"].tolist(), shown["prediction"].tolist(), strict=True)


def _grey_factor(difference: Any) -> float:
    """Three digits, rounded down, so that the largest difference just reaches black or white."""
    largest = float(np.abs(difference).max(initial=0.0))
    if largest == 0:
        return 1.0
    factor = 0.5 / largest
    unit = 10.0 ** (math.floor(math.log10(factor)) - 2)
    return float(f"{math.floor(factor / unit + 1e-9) * unit:.6g}")


def _grid(rows: Mapping[str, Any], captions: Sequence[tuple[str, str, bool]], columns: int) -> Any:
    left, gap, head, foot = 78, 6, 20, 36
    side = (_WIDTH - left) / columns - gap
    tall, wide = next(iter(rows.values())).shape[1:3]
    cell = side * tall / wide
    height = head + len(rows) * (cell + gap) + foot
    figure = blank(height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0), autoscale_on=False)
    axes.set_axis_off()
    style: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 9, "parse_math": False}
    for row, (name, images) in enumerate(rows.items()):
        top = head + row * (cell + gap)
        axes.text(4, top + cell / 2, name, color=COLOURS["muted"], ha="left", va="center", fontsize=9)
        for column, image in enumerate(np.clip(images, 0, 1)):
            start = left + column * (side + gap)
            box = (start, start + side, top + cell, top)
            axes.imshow(image, interpolation="none", aspect="auto", extent=box, clip_on=False)
    letters = int(side / 6.2)
    for column, (label, seen, held) in enumerate(captions):
        middle = left + column * (side + gap) + side / 2
        seen_style = {**style, "color": COLOURS["ink" if held else "worst"], "fontweight": "bold"}
        mark = "✓ holds" if held else "✗ fooled"
        axes.text(middle, head / 2, _shorten(label, letters), color=COLOURS["ink"], **style)
        axes.text(middle, height - foot + 8, _shorten(seen, letters), **seen_style)
        axes.text(middle, height - foot + 24, mark, color=COLOURS["muted"], **style)
    return figure
