"""Study `perturbations`: what other models answer to perturbations alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitadel.quantities import percent, share_text, shorten
from vitadel.reporting.figures import (
    COLORS,
    Picture,
    Strip,
    add_legend,
    as_images,
    interval_reach,
    strip_figure,
    style_axes,
)
from vitadel.reporting.kind import Results, read_study_arrays, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table, share_cells, share_columns

_WHAT = {"label": "the label", "reached": "the class that the attack reached"}
_PANEL = 34  # points for each model and target
_FOOT = 40
_ROUNDING = 1e-9


def against_chance(seen: Mapping[str, Any], dealt: Mapping[str, Any]) -> str:
    """Whether a share lies outside the middle 95 % of what shuffled targets score."""
    low, high = dealt["ci95"]
    if low - _ROUNDING <= seen["accuracy"] <= high + _ROUNDING:
        return "no more than chance"
    return "more often than by chance" if seen["accuracy"] > high else "less often than by chance"


def draw_agreement(figure: Any, rows: Sequence[tuple[str, Mapping[str, Any]]], k: int) -> None:
    """In the figure's lower part, one row each: the images, a control with an interval, and what chance gives."""
    height = figure.get_figheight() * 72
    axes = figure.add_axes((0.36, _FOOT / height, 0.61, _PANEL * len(rows) / height))
    for place, (_, entry) in enumerate(rows):
        axes.barh(
            place,
            100 * (entry["dealt"]["ci95"][1] - entry["dealt"]["ci95"][0]),
            left=100 * entry["dealt"]["ci95"][0],
            height=0.8,
            color=COLORS["grid"],
            label="chance: shuffled targets" if place == 0 else None,
        )
        control = next(name for name in ("scattered", "start") if name in entry)
        for lift, name, color in ((-0.15, "pictures", "worst"), (0.15, control, "clean")):
            seen = entry[name]
            words = {"pictures": "images", "scattered": "their pixels shuffled", "start": "their initial noise"}
            axes.errorbar(
                [100 * seen["accuracy"]],
                [place + lift],
                xerr=interval_reach([seen], "accuracy"),
                fmt="o",
                markersize=4,
                color=COLORS[color],
                label=words[name] if place == 0 else None,
            )
    axes.set(xlim=(0, 100), ylim=(len(rows) - 0.5, -0.5), xlabel=f"target among the first {k} answers, % of images")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], parse_math=False)
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3}  # never over points
    add_legend(axes, fontsize=8, **above)
    style_axes(axes)


def panel_height(rows: Sequence[Any]) -> float:
    return _PANEL * len(rows) + _FOOT + 24


def _draw(run: Run) -> Picture | None:
    found, arrays = run.results["study"], read_study_arrays(run)
    if not arrays:
        return None
    named = [run.class_name(int(each)) for each in arrays["label"]]
    reached = [run.class_name(int(each)) for each in arrays["reached"]]
    strips = [
        Strip("image", as_images(arrays["x"]), named),
        Strip("attacked", as_images(arrays["z"]), reached),
        Strip("perturbation", as_images(arrays["change"])),
    ]
    rows = [(f"{shorten(name, 22)}, {what}", _of_k(entry[what])) for name, entry, what in _judged(found)]
    with strip_figure(strips, below=panel_height(rows) + 6) as figure:
        draw_agreement(figure, rows, found["k"])
    return Picture("study-perturbations", figure, f"Images and perturbations. {_sentence(found)}")


def _judged(found: Results) -> list[tuple[str, Mapping[str, Any], str]]:
    return [
        (entry["name"], entry, what) for entry in found["models"] for what in _WHAT if entry[what]["dealt"]["topk"]["n"]
    ]


def _of_k(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = {"pictures": "perturbation", "scattered": "scattered", "dealt": "dealt"}
    return {name: entry[inside]["topk"] for name, inside in names.items()}


def _sentence(found: Results) -> str:
    others = [entry for entry in found["models"] if not entry["itself"]] or found["models"]
    parts = []
    for entry in others:
        seen, dealt = entry["label"]["perturbation"]["topk"], entry["label"]["dealt"]["topk"]
        parts.append(
            f"{entry['name']} has the label among its first {found['k']} answers for "
            f"{share_text(seen, 'accuracy')}, {against_chance(seen, dealt)}: {percent(dealt['accuracy'])}"
        )
    return f"Shown {found['n']:,} perturbations of {found['attack']['name']} alone, {'; '.join(parts)}."


def _tables(found: Results) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for name, entry, what in _judged(found):
        for title, top in (("first answer", "top1"), (f"first {found['k']}", "topk")):
            shares = (entry[what][kind][top] for kind in ("perturbation", "scattered", "dealt"))
            cells = [cell for share in shares for cell in share_cells(share, "accuracy")]
            rows.append((f"{name} (attacked)" if entry["itself"] else name, _WHAT[what], title, *cells))
    names = ("perturbations", "pixels shuffled", "shuffled targets")
    columns = (*map(Column, ("model", "target", "answers")), *(each for name in names for each in share_columns(name)))
    tables = [Table("What models answer to perturbations alone.", columns, tuple(rows))]
    paper: list[tuple[Cell, ...]] = [
        (entry["name"], *share_cells(entry["clean"], "accuracy"), *share_cells(entry["paper_style"], "accuracy"))
        for entry in found["models"]
        if entry["paper_style"]
    ]
    headings = (Column("classifier"), *share_columns("clean accuracy"), *share_columns(f"top-{found['k']} accuracy"))
    return tables + (
        [Table(f"In the paper's style ({found['paper_style']}).", headings, tuple(paper))] if paper else []
    )


def _remarks(found: Results) -> list[str]:
    others = "" if len(found["models"]) > 1 else " No other model was tested: name some with --others."
    guess = percent(found["chance"]["topk"])
    return [
        f"The attack does not stop at success and fools {percent(found['fooled']['success'])} of the images that were "
        f"correct before; only these count for the class it reached. Guesses among balanced classes score {guess}, but "
        "a model may give the same answer to every perturbation, which is why targets are shuffled among images for "
        "comparison: the interval there is the middle 95 % of all shuffles.",
        "An attack leads away from the label, so answers to its perturbation may have it less often than chance; that, "
        f"too, shows that other models recognize something in it.{others}",
    ]


KIND = study(
    title="What perturbations show",
    caption="Above, images, what the attack makes of them, and the change alone, each stretched to the whole range. "
    "Below, how often other models answer with the target; gray bands are what chance gives.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
