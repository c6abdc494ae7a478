"""Stability under noisy patches: similarity of attention, accuracy over masks, drift of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

from vitadel.quantities import percent, share_text
from vitadel.reporting.figures import COLORS, Picture, add_legend, new_figure, style_axes
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.kinds.audit import audit_sections
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Cell, Column, Table, mean_cells, mean_columns, share_cells, share_columns
from vitadel.reporting.terminal import show_sections

_SELECTIONS = {"random": ("clean", "random"), "learned": ("worst", "learned"), "transfer": ("attack", "transferred")}
_SIMILARITIES = {
    "map": "whole attention maps, each of a head and layer taken for one vector",
    "rows": "rows of attention maps, averaged",
    "centre": "the row of the patch in the center",
}


def draw_stability(run: Run) -> Picture:
    """Three panels: similarity of attention, accuracy, drift."""
    found = run.results["stability"]
    with new_figure(290) as figure:
        similarity, accuracy, drift = (figure.add_axes((left, 0.2, 0.25, 0.72)) for left in (0.07, 0.405, 0.735))
        _draw_similarity(similarity, found)
        _draw_accuracy(accuracy, found, run.results["clean"]["accuracy"])
        _draw_drift(drift, found)
        for axes in (similarity, accuracy, drift):
            style_axes(axes)
            if axes.get_legend_handles_labels()[0]:
                add_legend(axes, fontsize=8)
    return Picture("stability", figure, f"Stability under noisy patches. {_sentence(run)}")


def _draw_similarity(axes: Any, found: Mapping[str, Any]) -> None:
    shown = [("random", "first_mask", "clean", "a random mask"), ("random", "worst_mask", "ink", "worst random mask")]
    shown += [(how, "first_mask", *_SELECTIONS[how]) for how in ("learned", "transfer")]
    for how, which, color, label in shown:
        if how in found:
            entry = found[how]["similarity"][which]
            label = label if how == "random" else f"{label} mask"
            axes.stairs(entry["counts"], entry["edges"], color=COLORS[color], label=label)
    axes.set(xlabel="cosine of attention", ylabel="images")


def _draw_accuracy(axes: Any, found: Mapping[str, Any], clean: float) -> None:
    curve = found["random"]["accuracy"]["curve"]
    places = range(1, len(curve) + 1)
    axes.plot(places, [100 * each for each in curve], color=COLORS["clean"], label="random, in order")
    axes.axhline(100 * clean, color=COLORS["muted"], linestyle=":", linewidth=1, label="clean images")
    for how in ("learned", "transfer"):
        if how in found:
            color, name = _SELECTIONS[how]
            axes.axhline(100 * found[how]["accuracy"]["mean"], color=COLORS[color], linewidth=1, label=name)
    lowest = min(100 * curve[0], *(line.get_ydata()[0] for line in axes.lines))
    axes.set(xlabel="an image's masks, worst first", ylabel="accuracy, %", ylim=(max(0, lowest - 5), 101))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_drift(axes: Any, found: Mapping[str, Any]) -> None:
    for how, (color, name) in _SELECTIONS.items():
        if how in found:
            entry = found[how]["drift"]
            places = range(1, len(entry["median"]) + 1)
            axes.fill_between(places, entry["lower"], entry["upper"], color=COLORS[color], alpha=0.15, linewidth=0)
            axes.plot(places, entry["median"], color=COLORS[color], label=name)
    axes.set(xlabel="block", ylabel="|F(x') - F(x)| / |F(x)|")
    axes.xaxis.get_major_locator().set_params(integer=True)


def stability_tables(found: Mapping[str, Any]) -> list[Table]:
    """Accuracy under masks, then similarity and drift, one row for each way of selecting patches."""
    masks = found["masks"]
    accuracy: list[tuple[Cell, ...]] = []
    similarity: list[tuple[Cell, ...]] = []
    for how, (_, name) in _SELECTIONS.items():
        if how not in found:
            continue
        seen, near = found[how]["accuracy"], found[how]["similarity"]
        several = how == "random" and masks > 1  # other masks are chosen once
        low, high = (share_cells(seen[end] if several else None, "accuracy") for end in ("worst", "best"))
        middle = [100 * each if several else None for each in seen["quartiles"]]
        accuracy.append((name, *share_cells(seen, "mean"), *low, *middle, *high))
        worst = near["worst_mask"]["mean"] if several else None
        similarity.append((name, *mean_cells(near), worst, found[how]["drift"]["median"][-1]))
    quartiles = [Column(f"{name} quartile, %", 1) for name in ("lower", "middle", "upper")]
    shares = (*share_columns("mean over masks"), *share_columns(f"worst of {masks}"), *quartiles)
    moved = (Column("worst mask of each image", 3), Column("drift, last block", 3))
    return [
        Table(
            f"Accuracy with noise in {found['corrupted']} of {found['patches']} patches. Worst, quartiles and "
            f"best are by image: of its {masks} random masks the worst, then those a quarter, half and three quarters "
            "up the order, and the best.",
            (Column("patches"), *shares, *share_columns(f"best of {masks}")),
            tuple(accuracy),
        ),
        Table(
            f"Cosine with the clean image: {_SIMILARITIES[found['similarity']]}, a mean over heads, "
            f"layers and, for random patches, {found['watched']} masks (others are chosen once); and how far the last "
            "block's features moved, likewise.",
            (Column("patches"), *mean_columns("cosine of attention"), *moved),
            tuple(similarity),
        ),
    ]


def _examples_table(found: Mapping[str, Any]) -> list[Table]:
    """Cosines of single images over random masks, as figures 3 and 8 of AFAT; nothing for a single mask."""
    images = found["random"]["similarity"].get("images") or []
    if found["watched"] == 1 or not images:
        return []
    columns = (Column("image", 0), Column("masks", 0), Column("mean", 3))
    quantiles = tuple(Column(f"{share} % quantile", 3) for share in (5, 25, 50, 75, 95))
    return [
        Table(
            "Cosine of attention of single images over their random masks, a mean over heads and layers; "
            "cosines.parquet has every image, mask and layer.",
            (*columns, *quantiles),
            tuple((each["index"], each["masks"], each["mean"], *each["quantiles"]) for each in images),
        )
    ]


def _remarks(found: Mapping[str, Any]) -> list[str]:
    by_mask = found["random"]["accuracy"]["by_mask"]
    remarks = [
        f"Another reading of accuracy over masks, one random mask for every image, gives {percent(by_mask['lowest'])} "
        f"to {percent(by_mask['highest'])}: with many images these agree for every model and say nothing about it."
    ]
    if "learned" in found:
        remarks.append(
            "Learned patches are those of a patch selector trained against this very model, once, on other images; "
            "the interval does not include what another training of it would select."
        )
    return remarks


def _sentence(run: Run) -> str:
    found, clean = run.results["stability"], run.results["clean"]
    seen, near = found["random"]["accuracy"], found["random"]["similarity"]
    sentence = (
        f"Of {found['n']:,} images {percent(clean['accuracy'])} are classified correctly; with noise in "
        f"{found['corrupted']} of {found['patches']} patches {percent(seen['mean'])} on average, "
        f"{percent(seen['worst']['accuracy'])} under the worst of {found['masks']} random masks"
    )
    if "learned" in found:
        sentence += f" and {percent(found['learned']['accuracy']['mean'])} under learned ones"
    return f"{sentence}. The cosine of attention with that of the clean image is {near['mean']:.2f} on average."


def _sections(run: Run) -> list[Section]:
    found = run.results["stability"]
    own = Section(
        "Stability under noisy patches",
        lambda: draw_stability(run),
        "Left, how similar attention stays to that of the clean image. Middle, accuracy when each image's masks are "
        "sorted. Right, how far the features of each block move; bands reach from the lower to the upper quartile.",
        [*stability_tables(found), *_examples_table(found)],
        _remarks(found),
        file="stability-under-noisy-patches",
    )
    return [own, *audit_sections(run)]


def _show(run: Run) -> None:
    show_sections(run)
    for entry in run.attacks:
        Console().print(f"{escape(entry['name'])}: {share_text(entry, 'robust_accuracy')}, this attack alone")


KIND = Kind(_sentence, _sections, show=_show)
