"""Pictures that models climb to out of noise, for people."""

from __future__ import annotations

from typing import Any

from vitadel.reporting.cells import Cell, Column, Table, share_cells, share_columns
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style, printable
from vitadel.reporting.image_grid import Strip, as_images, draw_strips, height_of
from vitadel.reporting.kinds.study_perturbations import against_chance, draw_agreement, panel_height
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, percent
from vitadel.reporting.study import Study, Told, arrays_of

__all__ = ["ACCUMULATION"]

_COURSE = 150  # points
_LINES = ("-", "--", ":", "-.")
_MOST = 10  # classes that are drawn


def _draw(run: Run) -> Picture | None:
    told, arrays = run.results["study"], arrays_of(run)
    if not arrays:
        return None
    names = [entry["name"] for entry in told["classes"]][:_MOST]
    strips = [
        Strip(_short(maker["name"]), as_images(arrays[f"pictures {number}"][:_MOST]), names)
        for number, maker in enumerate(told["models"])
    ]
    rows = [
        (f"{_short(maker['name'])} by {_short(seen['name'])}", {part: seen[part]["topk"] for part in _PARTS})
        for maker in told["models"]
        for seen in maker["seen_by"]
        if not seen["itself"] or len(told["models"]) == 1
    ]
    height = height_of(strips) + _COURSE + panel_height(rows) + 20
    with our_style():
        figure = blank(height)
        draw_strips(figure, strips)
        axes = figure.add_axes((0.08, (panel_height(rows) + 34) / height, 0.89, (_COURSE - 44) / height))
        lines: list[Any] = []
        for maker, line in zip(told["models"], _LINES * len(told["models"]), strict=False):
            course = maker["confidence"]
            places, style = range(len(course["median"])), {"color": COLOURS["ink"], "linestyle": line}
            axes.fill_between(places, course["lower"], course["upper"], color=COLOURS["grid"], alpha=0.5, linewidth=0)
            lines += axes.plot(places, course["median"], **style)
        axes.set(ylim=(0, 1.02), xlabel="step", ylabel="confidence")
        axes.xaxis.get_major_locator().set_params(integer=True)
        names_shown = [_short(printable(maker["name"])) for maker in told["models"]]
        legend = axes.legend(lines, names_shown, frameon=False, fontsize=8, labelcolor=COLOURS["muted"])
        for text in legend.get_texts():
            text.set_parse_math(False)
        plain_axes(axes)
        draw_agreement(figure, rows, told["k"])
    return Picture("study-accumulation", figure, f"Pictures of {len(told['classes'])} classes. {_sentence(told)}")


_PARTS = ("pictures", "start", "dealt")


def _short(name: str) -> str:
    name = name.removeprefix("zoo:")
    return name if len(name) <= 20 else f"…{name[-19:]}"


def _sentence(told: Told) -> str:
    """About the model that is studied; what other models make is in the table."""
    maker = told["models"][0]
    said = [
        f"{seen['name']} names the class in {percent(seen['pictures']['top1']['accuracy'])}, "
        f"{against_chance(seen['pictures']['top1'], seen['dealt']['top1'])}"
        for seen in maker["seen_by"]
        if not seen["itself"]
    ]
    sure = f"it is sure of its own by {maker['confidence']['median'][-1]:.2f} (median), which is what was climbed"
    start = "noise" if told["start"] == "noise" else "grey"
    return (
        f"After {told['steps']} steps from {start}, of {told['n']} pictures of {len(told['classes'])} classes that "
        f"{maker['name']} makes: {'; '.join([*said, sure])}."
    )


def _tables(told: Told) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    for maker in told["models"]:
        for seen in maker["seen_by"]:
            for title, top in (("first answer", "top1"), (f"first {told['k']}", "topk")):
                cells = [cell for part in _PARTS for cell in share_cells(seen[part][top], "accuracy")]
                rows.append((maker["name"], "itself" if seen["itself"] else seen["name"], title, *cells))
    names = ("pictures", "noise they began as", "dealt at random")
    columns = (
        *map(Column, ("pictures by", "shown to", "answers")),
        *(column for name in names for column in share_columns(name)),
    )
    return [Table("", "How often the class that was climbed to is the answer.", columns, tuple(rows))]


def _remarks(told: Told) -> list[str]:
    return [
        f"Every step goes up the {told['objective']} of the class by {told['step']:g} root mean square, and the only "
        f"bound is the box of pixels; each picture begins as the same noise in all models. That a "
        "model is sure of its own pictures says nothing: it is what was climbed. Intervals are over pictures, several "
        "of which are of one class.",
    ]


ACCUMULATION = Study(
    title="Pictures out of noise",
    caption="Above, one picture of each class. Middle, the maker's confidence in the class as it climbs: median and "
    "quartiles. Below, how often other models see the class; grey bands are what chance gives.",
    sentence=_sentence,
    draw=_draw,
    tables=_tables,
    remarks=_remarks,
)
