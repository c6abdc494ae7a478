"""How saturated attention is, for people: a histogram for each block, and a sentence about the worst of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitadel.reporting.cells import Column, Table, share_cells, share_columns
from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, interval_text, percent
from vitadel.reporting.study import Study, Told, arrays_of

__all__ = ["SATURATION", "draw_saturation", "saturation_sentence", "saturation_tables"]

_COLUMNS, _MOST = 4, 12
_TOGETHER = 4  # bins of the file in one of the figure
_LINES = {
    ("deployed", "clean"): ("clean", "-", "clean"),
    ("deployed", "attacked"): ("worst", "-", "attacked"),
    ("scaled", "clean"): ("clean", ":", "clean, scaled"),
    ("scaled", "aas"): ("worst", ":", "attacked, scaled"),
}
_FURTHER = {"leaves_normal_range": "leaves the normal range", "vanishes": "vanishes"}
_IMAGES = {"clean": "clean", "attacked": "attacked", "aas": "attacked through scaled attention"}


def draw_saturation(run: Run) -> Picture | None:
    """Small multiples, one for each block; None if the histograms are gone."""
    told, arrays = run.results["study"], arrays_of(run)
    if not {"edges", "counts"} <= arrays.keys():
        return None
    blocks = len(told["blocks"])
    shown = sorted({round(place) for place in np.linspace(0, blocks - 1, min(blocks, _MOST)).tolist()})
    rows = -(-len(shown) // _COLUMNS)
    height = 64 + 130 * rows
    with our_style():
        figure = blank(height)
        for number, block in enumerate(shown):
            row, column = divmod(number, _COLUMNS)
            bottom = (34 + 130 * (rows - 1 - row)) / height
            axes = figure.add_axes((0.04 + 0.242 * column, bottom, 0.22, 92 / height))
            _draw_block(axes, told, arrays, block)
        lines, labels = axes.get_legend_handles_labels()
        figure.legend(
            lines, labels, ncols=len(_LINES), frameon=False, fontsize=8, labelcolor=COLOURS["muted"], loc="upper left"
        )
    return Picture("saturation", figure, f"Histograms of the gap before the softmax. {saturation_sentence(told)}")


def _draw_block(axes: Any, told: Told, arrays: Any, block: int) -> None:
    edges = arrays["edges"][::_TOGETHER]
    for place, condition in enumerate(told["conditions"]):
        look = _LINES.get((condition["attention"], condition["images"]))
        counts = arrays["counts"][place, block]
        if look is None or counts.sum() == 0:
            continue
        color, style, label = look
        inside = np.add.reduceat(counts[1:-1], np.arange(0, len(counts) - 2, _TOGETHER))
        axes.stairs(inside / counts.sum(), edges, color=COLOURS[color], linestyle=style, label=label)
    limits = told["thresholds"][told["precision"]]
    for name in ("rounds_to_one", "leaves_normal_range"):
        axes.axvline(limits[name], color=COLOURS["muted"], linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlim=(edges[0], edges[-1]))
    axes.set_title(told["blocks"][block], fontsize=8, color=COLOURS["muted"], parse_math=False)
    axes.set_yticks([])
    plain_axes(axes)


def _condition(told: Told, attention: str, images: str) -> Told:
    found: Told = next(
        entry for entry in told["conditions"] if (entry["attention"], entry["images"]) == (attention, images)
    )
    return found


def saturation_sentence(told: Told) -> str:
    """The most saturated block on clean images, and what attacks and scaling make of it."""
    blocks = _condition(told, "deployed", "clean")["blocks"]
    worst = max(range(len(blocks)), key=lambda b: (_saturated(blocks[b])["share"], blocks[b]["quantiles"]["0.99"]))
    limit = told["thresholds"][told["precision"]]["rounds_to_one"]
    clean = _saturated(blocks[worst])
    attacked, softened = (
        _condition(told, *which)["blocks"][worst] for which in (("deployed", "attacked"), ("scaled", "clean"))
    )
    return (
        f"Of {told['n']:,} images' attention rows in {told['blocks'][worst]}, the most saturated of {len(blocks)}, "
        f"{percent(clean['share'])} ({interval_text(clean['ci95'])}) have a gap beyond {limit:.1f}, from which on "
        f"{told['precision']} rounds their softmax to one; attacked by {told['attack']} "
        f"{percent(_saturated(attacked)['share'])}, with the factors of aas {percent(_saturated(softened)['share'])}. "
        f"The median gap there is {blocks[worst]['quantiles']['0.5']:.3g}, and {softened['quantiles']['0.5']:.3g} with "
        "the factors."
    )


def _saturated(block: Told) -> Told:
    found: Told = block["beyond"]["rounds_to_one"]
    return found


def saturation_tables(told: Told) -> list[Table]:
    quantiles = list(told["conditions"][0]["blocks"][0]["quantiles"])
    columns = (
        *(Column("block"), Column("attention"), Column("images"), Column("factor", 4)),
        *(Column(f"quantile {name}", 3) for name in quantiles),
        Column("largest", 3),
        *share_columns("rounds to one"),
        *(Column(f"{words}, %", 2) for words in _FURTHER.values()),
    )
    rows = tuple(
        (
            name,
            entry["attention"],
            _IMAGES[entry["images"]],
            told["factors"][number] if entry["attention"] == "scaled" else 1.0,
            *(entry["blocks"][number]["quantiles"][quantile] for quantile in quantiles),
            entry["blocks"][number]["largest"],
            *share_cells(_saturated(entry["blocks"][number]), "share"),
            *(100 * entry["blocks"][number]["beyond"][key]["share"] for key in _FURTHER),
        )
        for number, name in enumerate(told["blocks"])
        for entry in told["conditions"]
    )
    return [Table("", "Gaps between the two largest scores of attention rows.", columns, rows)]


def _remarks(told: Told) -> list[str]:
    formats = "; ".join(
        f"{kind} {limits['rounds_to_one']:.1f}, {limits['leaves_normal_range']:.1f} and {limits['vanishes']:.1f}"
        for kind, limits in told["thresholds"].items()
    )
    return [
        f"A softmax rounds to one, its second best leaves the normal range, and vanishes, from gaps of: {formats}.",
        "A small gradient of a saturated softmax is mostly true, not a rounding error: compare an attack in float64.",
        f"Quantiles come from {told['quantiles_by']}; intervals are bootstrapped over images.",
    ]


SATURATION = Study(
    "Saturation of attention",
    "Share of attention rows by their gap (logarithmic). Dashed verticals: from there on the softmax rounds to one, "
    "and the second best leaves the normal range of the model's float format.",
    saturation_sentence,
    draw_saturation,
    saturation_tables,
    _remarks,
)
