"""What other models see in perturbations alone, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitadel.reporting.cells import Cell, Column, Table, share_cells, share_columns
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.image_grid import Strip, as_images, draw_strips, height_of
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, interval_text, percent
from vitadel.reporting.study import Study, Told, arrays_of

__all__ = ["PERTURBATIONS", "against_chance", "draw_agreement"]

_WHAT = {"label": "the label", "reached": "the class that the attack reached"}
_PANEL = 34  # points for each model and target
_FOOT = 40
_ROUNDING = 1e-9


def against_chance(seen: Mapping[str, Any], dealt: Mapping[str, Any]) -> str:
    """In words: beyond the middle 95 % of what random deals of the same pictures would score, or not."""
    low, high = dealt["ci95"]
    if low - _ROUNDING <= seen["accuracy"] <= high + _ROUNDING:
        return "no more than chance"
    return "more often than by chance" if seen["accuracy"] > high else "less often than by chance"


def draw_agreement(figure: Any, rows: Sequence[tuple[str, Mapping[str, Any]]], k: int) -> None:
    """In the figure's lower part, one row each: the pictures, a control with an interval, and what chance gives."""
    height = figure.get_figheight() * 72
    axes = figure.add_axes((0.36, _FOOT / height, 0.61, _PANEL * len(rows) / height))
    for place, (_, entry) in enumerate(rows):
        axes.barh(
            place,
            100 * (entry["dealt"]["ci95"][1] - entry["dealt"]["ci95"][0]),
            left=100 * entry["dealt"]["ci95"][0],
            height=0.8,
            color=COLOURS["grid"],
            label="chance: pictures dealt at random" if place == 0 else None,
        )
        control = next(name for name in ("scattered", "start") if name in entry)
        for lift, name, color in ((-0.15, "pictures", "worst"), (0.15, control, "clean")):
            seen = entry[name]
            bar = [[100 * (seen["accuracy"] - seen["ci95"][0])], [100 * (seen["ci95"][1] - seen["accuracy"])]]
            words = {"pictures": "pictures", "scattered": "their pixels scattered", "start": "the noise they began as"}
            axes.errorbar(
                [100 * seen["accuracy"]],
                [place + lift],
                xerr=bar,
                fmt="o",
                markersize=4,
                color=COLOURS[color],
                label=words[name] if place == 0 else None,
            )
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel=f"target among the first {k} answers, % of pictures")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], parse_math=False)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}  # wherever points may lie
    axes.legend(frameon=False, fontsize=8, labelcolor=COLOURS["muted"], **above)
    plain_axes(axes)


def panel_height(rows: Sequence[Any]) -> float:
    return _PANEL * len(rows) + _FOOT + 24


def _draw(run: Run) -> Picture | None:
    told, arrays = run.results["study"], arrays_of(run)
    if not arrays:
        return None
    named = [run.class_name(int(each)) for each in arrays["label"]]
    reached = [run.class_name(int(each)) for each in arrays["reached"]]
    strips = [
        Strip("image", as_images(arrays["x"]), named),
        Strip("attacked", as_images(arrays["z"]), reached),
        Strip("perturbation", as_images(arrays["change"])),
    ]
    rows = [(f"{_short(name)}, {what}", _of_k(entry[what])) for name, entry, what in _judged(told)]
    with our_style():
        figure = blank(height_of(strips) + 12 + panel_height(rows))
        draw_strips(figure, strips)
        draw_agreement(figure, rows, told["k"])
    return Picture("study-perturbations", figure, f"Images and perturbations. {_sentence(told)}")


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"


def _judged(told: Told) -> list[tuple[str, Mapping[str, Any], str]]:
    return [
        (entry["name"], entry, what) for entry in told["models"] for what in _WHAT if entry[what]["dealt"]["topk"]["n"]
    ]


def _of_k(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = {"pictures": "perturbation", "scattered": "scattered", "dealt": "dealt"}
    return {name: entry[inside]["topk"] for name, inside in names.items()}


def _sentence(told: Told) -> str:
    others = [entry for entry in told["models"] if not entry["itself"]] or told["models"]
    parts = []
    for entry in others:
        seen, dealt = entry["label"]["perturbation"]["topk"], entry["label"]["dealt"]["topk"]
        parts.append(
            f"{entry['name']} has the label among its first {told['k']} answers for {percent(seen['accuracy'])} "
            f"({interval_text(seen['ci95'])}), {against_chance(seen, dealt)}: {percent(dealt['accuracy'])}"
        )
    return f"Shown {told['n']:,} perturbations of {told['attack']['name']} alone, {'; '.join(parts)}."


def _tables(told: Told) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, entry, what in _judged(told):
        for title, top in (("first answer", "top1"), (f"first {told['k']}", "topk")):
            shares = (entry[what][kind][top] for kind in ("perturbation", "scattered", "dealt"))
            cells = [cell for share in shares for cell in share_cells(share, "accuracy")]
            rows.append((f"{name} (attacked)" if entry["itself"] else name, _WHAT[what], title, *cells))
    names = ("perturbations", "pixels scattered", "dealt at random")
    columns = (*map(Column, ("model", "target", "answers")), *(each for name in names for each in share_columns(name)))
    tables = [Table("", "What models answer to perturbations alone.", columns, tuple(rows))]
    paper: list[tuple[Cell, ...]] = [
        (entry["name"], *share_cells(entry["clean"], "accuracy"), *share_cells(entry["paper_style"], "accuracy"))
        for entry in told["models"]
        if entry["paper_style"]
    ]
    headings = (Column("classifier"), *share_columns("clean accuracy"), *share_columns(f"top-{told['k']} accuracy"))
    return tables + (
        [Table("", f"In the paper's style ({told['paper_style']}).", headings, tuple(paper))] if paper else []
    )


def _remarks(told: Told) -> list[str]:
    others = "" if len(told["models"]) > 1 else " No other model was asked: name some with --others."
    guess = percent(told["chance"]["topk"])
    return [
        f"The attack goes all the way and fools {percent(told['fooled']['success'])} of the images that were right "
        f"before; the class it reached is asked for among those. Blind guesses among balanced classes score {guess}, "
        "but a model may give one answer to every such picture, which is why perturbations are dealt out to other "
        "images for comparison: the interval there is the middle 95 % of all deals.",
        "An attack leads away from the label, so that answers to its perturbation may have it less often than chance; "
        f"that, too, is something that other models see in it.{others}",
    ]


PERTURBATIONS = Study(
    title="What perturbations show",
    caption="Above, images, what the attack makes of them, and the change alone, each stretched to the whole range. "
    "Below, how often other models see the target in the change; grey bands are what chance gives.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
