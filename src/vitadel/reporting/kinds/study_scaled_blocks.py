"""AAS with some blocks scaled, for people."""

from __future__ import annotations

from typing import Any

from vitadel.reporting.cells import Column, Table, share_cells, share_columns
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, interval_text, percent
from vitadel.reporting.study import Study, Told

__all__ = ["SCALED_BLOCKS", "draw_scaled_blocks", "scaled_blocks_sentence", "scaled_blocks_tables"]

_AXES = {"first": "first k blocks scaled", "single": "only block k scaled", "last": "last k blocks scaled"}


def draw_scaled_blocks(run: Run) -> Picture | None:
    """A panel for each way of choosing blocks."""
    told = run.results["study"]
    with our_style():
        figure = blank(280)
        width = 0.93 / len(told["curves"])
        for number, curve in enumerate(told["curves"]):
            axes = figure.add_axes((0.065 + number * width, 0.2, width - 0.045, 0.72), ylim=(0, 101))
            _draw_way(axes, curve["points"])
            axes.axhline(100 * told["plain"]["robust_accuracy"], color=COLOURS["muted"], linestyle=":", linewidth=1)
            axes.set_xlabel(_AXES[curve["way"]])
            plain_axes(axes)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if number == 0:
                axes.set_ylabel("accuracy, %")
                axes.legend(frameon=False, fontsize=8, labelcolor=COLOURS["muted"])
    return Picture("scaled-blocks", figure, f"Robust accuracy by scaled blocks. {scaled_blocks_sentence(told)}")


def _draw_way(axes: Any, points: list[Told]) -> None:
    places = [point["at"] for point in points]
    kinds = (
        ([point["clean_scaled"] for point in points], "accuracy", "clean", ":", "clean, rescaled model"),
        ([point["paper_style"] for point in points], "robust_accuracy", "attack", "--", "paper_style (rescaled model)"),
        (points, "robust_accuracy", "worst", "-", "deployed model"),
    )
    for entries, name, color, style, label in kinds:
        low, high = ([100 * entry["ci95"][end] for entry in entries] for end in (0, 1))
        axes.fill_between(places, low, high, color=COLOURS[color], alpha=0.12, linewidth=0)
        values = [100 * entry[name] for entry in entries]
        axes.plot(places, values, color=COLOURS[color], linestyle=style, marker="o", markersize=3, label=label)


def scaled_blocks_sentence(told: Told) -> str:
    """All blocks scaled against none, on the deployed model; the paper's way with its proper name."""
    everything, nothing = told["all_scaled"], told["none_scaled"]
    points = [point for curve in told["curves"] for point in curve["points"]]
    chosen = everything or min(points, key=lambda point: point["robust_accuracy"])
    which = "all" if everything else f"{len(chosen['scaled'])} of"
    told_of = (
        f"With aas's factors in {which} {len(told['blocks'])} attentions, {told['attack']} leaves "
        f"{percent(chosen['robust_accuracy'])} ({interval_text(chosen['ci95'])}) of {told['n']:,} images standing on "
        "the deployed model"
    )
    if nothing:
        told_of += (
            f", against {percent(nothing['robust_accuracy'])} ({interval_text(nothing['ci95'])}) with nothing scaled "
        )
        told_of += "at the same cost"
    return (
        f"{told_of}. Judged on the rescaled model (paper_style) it would be "
        f"{percent(chosen['paper_style']['robust_accuracy'])}, which is no robustness estimate: that model classifies "
        f"{percent(chosen['clean_scaled']['accuracy'])} of clean images correctly, the deployed one "
        f"{percent(told['clean']['accuracy'])}."
    )


def scaled_blocks_tables(told: Told) -> list[Table]:
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
            *share_cells(point["paper_style"], "robust_accuracy"),
            *share_cells(point["clean_scaled"], "accuracy"),
        )
        for curve in told["curves"]
        for point in curve["points"]
    )
    return [Table("", "Robust accuracy when only some blocks are scaled.", columns, rows)]


def _remarks(told: Told) -> list[str]:
    factors = ", ".join(f"{factor:.2g}" for factor in told["factors"])
    plain = told["plain"]
    return [
        f"The plain attack alone leaves {percent(plain['robust_accuracy'])} ({interval_text(plain['ci95'])}).",
        f"Factors, found once on other images: {factors}.",
        f"paper_style: {told['curves'][0]['points'][0]['paper_style']['remark']}.",
    ]


SCALED_BLOCKS = Study(
    "AAS with some blocks scaled",
    "Red: judged on the deployed model, together with the plain attack (dotted, grey). Orange: the paper's way of "
    "counting. Bands are 95 % intervals.",
    scaled_blocks_sentence,
    draw_scaled_blocks,
    scaled_blocks_tables,
    _remarks,
)
