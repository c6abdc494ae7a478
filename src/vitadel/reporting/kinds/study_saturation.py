"""Study `saturation`: how saturated the softmax of attention is, block by block."""

from __future__ import annotations

from typing import Any

import numpy as np

from vitadel.quantities import interval_text, percent
from vitadel.reporting.figures import COLORS, Picture, add_legend, new_figure, style_axes
from vitadel.reporting.kind import Results, read_study_arrays, study
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table, share_cells, share_columns

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


def _draw(run: Run) -> Picture | None:
    """One panel for each block; None if the folder has no histograms."""
    found, arrays = run.results["study"], read_study_arrays(run)
    if not {"edges", "counts"} <= arrays.keys():
        return None
    blocks = len(found["blocks"])
    shown = sorted({round(place) for place in np.linspace(0, blocks - 1, min(blocks, _MOST)).tolist()})
    rows = -(-len(shown) // _COLUMNS)
    height = 64 + 130 * rows
    with new_figure(height) as figure:
        for number, block in enumerate(shown):
            row, column = divmod(number, _COLUMNS)
            bottom = (34 + 130 * (rows - 1 - row)) / height
            axes = figure.add_axes((0.04 + 0.242 * column, bottom, 0.22, 92 / height))
            _draw_block(axes, found, arrays, block)
        lines, labels = axes.get_legend_handles_labels()
        add_legend(figure, lines, labels, fontsize=8, ncols=len(_LINES), loc="upper left")
    return Picture("saturation", figure, f"Histograms of the gap before the softmax. {_sentence(found)}")


def _draw_block(axes: Any, found: Results, arrays: Any, block: int) -> None:
    edges = arrays["edges"][::_TOGETHER]
    for place, condition in enumerate(found["conditions"]):
        line = _LINES.get((condition["attention"], condition["images"]))
        counts = arrays["counts"][place, block]
        if line is None or counts.sum() == 0:
            continue
        color, style, label = line
        inside = np.add.reduceat(counts[1:-1], np.arange(0, len(counts) - 2, _TOGETHER))
        axes.stairs(inside / counts.sum(), edges, color=COLORS[color], linestyle=style, label=label)
    limits = found["thresholds"][found["precision"]]
    for name in ("rounds_to_one", "leaves_normal_range"):
        axes.axvline(limits[name], color=COLORS["muted"], linewidth=0.8, linestyle="--")
    axes.set(xscale="log", xlim=(edges[0], edges[-1]))
    axes.set_title(found["blocks"][block], fontsize=8, color=COLORS["muted"], parse_math=False)
    axes.set_yticks([])
    style_axes(axes)


def _condition(found: Results, attention: str, images: str) -> Results:
    condition: Results = next(
        entry for entry in found["conditions"] if (entry["attention"], entry["images"]) == (attention, images)
    )
    return condition


def _sentence(found: Results) -> str:
    """The most saturated block on clean images, and what attacks and scaling make of it."""
    blocks = _condition(found, "deployed", "clean")["blocks"]
    worst = max(range(len(blocks)), key=lambda b: (_saturated(blocks[b])["share"], blocks[b]["quantiles"]["0.99"]))
    limit = found["thresholds"][found["precision"]]["rounds_to_one"]
    clean, median = _saturated(blocks[worst]), blocks[worst]["quantiles"]["0.5"]
    start = (
        f"Of {found['n']:,} images' attention rows in {found['blocks'][worst]}, the most saturated of {len(blocks)}, "
        f"{percent(clean['share'])} ({interval_text(clean['ci95'])}) have a gap beyond {limit:.1f}, from which on "
        f"{found['precision']} rounds their softmax to one"
    )
    if found["attack"] is None:
        return f"{start}. The median gap there is {median:.3g}, the largest {blocks[worst]['largest']:.3g}."
    attacked, softened = (
        _condition(found, *which)["blocks"][worst] for which in (("deployed", "attacked"), ("scaled", "clean"))
    )
    return (
        f"{start}; attacked by {found['attack']} {percent(_saturated(attacked)['share'])}, with the factors of aas "
        f"{percent(_saturated(softened)['share'])}. The median gap there is {median:.3g}, and "
        f"{softened['quantiles']['0.5']:.3g} with the factors."
    )


def _saturated(block: Results) -> Results:
    beyond: Results = block["beyond"]["rounds_to_one"]
    return beyond


def _gap_table(found: Results) -> Table:
    """What a study of clean images alone has measured."""
    columns = (Column("block"), Column("median", 3), Column("95 %", 3), Column("largest", 3))
    blocks = found["conditions"][0]["blocks"]
    rows = tuple(
        (
            name,
            *(block["quantiles"][quantile] for quantile in ("0.5", "0.95")),
            block["largest"],
            *share_cells(_saturated(block), "share"),
        )
        for name, block in zip(found["blocks"], blocks, strict=True)
    )
    return Table("Gaps between the two largest scores.", (*columns, *share_columns("rounds to one")), rows)


def _tables(found: Results) -> list[Table]:
    if found["attack"] is None:
        return [_gap_table(found)]
    quantiles = list(found["conditions"][0]["blocks"][0]["quantiles"])
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
            found["factors"][number] if entry["attention"] == "scaled" else 1.0,
            *(entry["blocks"][number]["quantiles"][quantile] for quantile in quantiles),
            entry["blocks"][number]["largest"],
            *share_cells(_saturated(entry["blocks"][number]), "share"),
            *(100 * entry["blocks"][number]["beyond"][key]["share"] for key in _FURTHER),
        )
        for number, name in enumerate(found["blocks"])
        for entry in found["conditions"]
    )
    return [Table("Gaps between the two largest scores of attention rows.", columns, rows)]


def _remarks(found: Results) -> list[str]:
    formats = "; ".join(
        f"{kind} {limits['rounds_to_one']:.1f}, {limits['leaves_normal_range']:.1f} and {limits['vanishes']:.1f}"
        for kind, limits in found["thresholds"].items()
    )
    return [
        f"A softmax rounds to one, its second best leaves the normal range, and vanishes, from gaps of: {formats}.",
        "A small gradient of a saturated softmax is mostly real, not a rounding error: compare an attack in float64.",
        f"Quantiles come from {found['quantiles_by']}; intervals are bootstrapped over images.",
    ]


KIND = study(
    "Saturation of attention",
    "Share of attention rows by their gap (logarithmic). Dashed verticals: from there on the softmax rounds to one, "
    "and the second best leaves the normal range of the model's float format.",
    _sentence,
    _draw,
    _tables,
    _remarks,
)
