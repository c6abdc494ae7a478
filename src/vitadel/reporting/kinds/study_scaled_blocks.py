"""Study `scaled-blocks`: AAS with only some blocks scaled."""

from __future__ import annotations

from typing import Any

from vitadel.quantities import percent, share_text
from vitadel.reporting.figures import COLORS, Picture, add_legend, new_figure, style_axes
from vitadel.reporting.kind import Results, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table, share_cells, share_columns

_AXES = {"first": "first k blocks scaled", "single": "only block k scaled", "last": "last k blocks scaled"}


def _draw(run: Run) -> Picture:
    """A panel for each way of choosing blocks."""
    found = run.results["study"]
    with new_figure(280) as figure:
        width = 0.93 / len(found["curves"])
        for number, curve in enumerate(found["curves"]):
            axes = figure.add_axes((0.065 + number * width, 0.2, width - 0.045, 0.72), ylim=(0, 101))
            _draw_way(axes, curve["points"])
            axes.axhline(100 * found["plain"]["robust_accuracy"], color=COLORS["muted"], linestyle=":", linewidth=1)
            axes.set_xlabel(_AXES[curve["way"]])
            style_axes(axes)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if number == 0:
                axes.set_ylabel("accuracy, %")
                add_legend(axes, fontsize=8)
    return Picture("scaled-blocks", figure, f"Robust accuracy by scaled blocks. {_sentence(found)}")


def _paper_style(point: Results) -> Results:
    """The share of the scaled model; runs before it was counted over all images call it `robust_accuracy`."""
    style: Results = point["paper_style"]
    return style if "accuracy" in style else {**style, "accuracy": style["robust_accuracy"]}


def _draw_way(axes: Any, points: list[Results]) -> None:
    places = [point["at"] for point in points]
    kinds = (
        ([point["clean_scaled"] for point in points], "accuracy", "clean", ":", "clean, rescaled model"),
        ([_paper_style(point) for point in points], "accuracy", "attack", "--", "paper_style (rescaled model)"),
        (points, "robust_accuracy", "worst", "-", "deployed model"),
    )
    for entries, name, color, style, label in kinds:
        low, high = ([100 * entry["ci95"][end] for entry in entries] for end in (0, 1))
        axes.fill_between(places, low, high, color=COLORS[color], alpha=0.12, linewidth=0)
        values = [100 * entry[name] for entry in entries]
        axes.plot(places, values, color=COLORS[color], linestyle=style, marker="o", markersize=3, label=label)


def _sentence(found: Results) -> str:
    """All blocks scaled compared with none, on the deployed model and counted as in the paper."""
    everything, nothing = found["all_scaled"], found["none_scaled"]
    points = [point for curve in found["curves"] for point in curve["points"]]
    chosen = everything or min(points, key=lambda point: point["robust_accuracy"])
    which = "all" if everything else f"{len(chosen['scaled'])} of"
    sentence = (
        f"With aas's factors in {which} {len(found['blocks'])} attentions, the deployed model still classifies "
        f"{share_text(chosen, 'robust_accuracy')} of {found['n']:,} images correctly under {found['attack']}"
    )
    if nothing:
        sentence += f", against {share_text(nothing, 'robust_accuracy')} with nothing scaled at the same cost"
    return (
        f"{sentence}. Judged on the rescaled model (paper_style) it would be "
        f"{percent(_paper_style(chosen)['accuracy'])}, which is no robustness estimate: that model classifies "
        f"{percent(chosen['clean_scaled']['accuracy'])} of clean images correctly, the deployed one "
        f"{percent(found['clean']['accuracy'])}."
    )


def _tables(found: Results) -> list[Table]:
    columns = (
        *(Column("blocks"), Column("k", 0)),
        *share_columns("deployed model"),
        *share_columns("without the plain attack"),
        *share_columns("paper_style"),
        *share_columns("clean, rescaled model"),
    )
    rows = tuple(
        (
            curve["way"],
            point["at"],
            *share_cells(point, "robust_accuracy"),
            *share_cells(point["alone"], "robust_accuracy"),
            *share_cells(_paper_style(point), "accuracy"),
            *share_cells(point["clean_scaled"], "accuracy"),
        )
        for curve in found["curves"]
        for point in curve["points"]
    )
    return [Table("Robust accuracy when only some blocks are scaled.", columns, rows)]


def _remarks(found: Results) -> list[str]:
    factors = ", ".join(f"{factor:.2g}" for factor in found["factors"])
    plain = found["plain"]
    return [
        f"The plain attack alone leaves {share_text(plain, 'robust_accuracy')}.",
        f"Factors, found once on other images: {factors}.",
        f"paper_style: {found['curves'][0]['points'][0]['paper_style']['remark']}.",
    ]


KIND = study(
    "AAS with some blocks scaled",
    "Red: judged on the deployed model, together with the plain attack (dotted, gray). Orange: the paper's way of "
    "counting. Bands are 95 % intervals.",
    _sentence,
    _draw,
    _tables,
    _remarks,
)
