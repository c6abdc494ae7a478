"""Stability under noisy patches for people: histogram of attention, accuracy over masks, drift of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, interval_text, percent

__all__ = ["draw_stability", "show_stability", "stability_remarks", "stability_sentence", "stability_tables"]

_WHO = {"random": ("clean", "random"), "learned": ("worst", "learned"), "transfer": ("attack", "transferred")}
_SIMILARITIES = {
    "map": "whole attention maps, each of a head and layer taken for one vector",
    "rows": "rows of attention maps, averaged",
    "centre": "the row of the patch in the centre",
}


def draw_stability(run: Run) -> Picture | None:
    """Three panels beside each other; None for a run of another suite."""
    told = run.results.get("stability")
    if not told or not run.complete:
        return None
    with our_style():
        figure = blank(290)
        nearness, accuracy, moved = (figure.add_axes((left, 0.2, 0.25, 0.72)) for left in (0.07, 0.405, 0.735))
        _draw_nearness(nearness, told)
        _draw_accuracy(accuracy, told, run.results["clean"]["accuracy"])
        _draw_drift(moved, told)
        for axes in (nearness, accuracy, moved):
            plain_axes(axes)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8, labelcolor=COLOURS["muted"])
    return Picture("stability", figure, f"Stability under noisy patches. {stability_sentence(run.results)}")


def _draw_nearness(axes: Any, told: Mapping[str, Any]) -> None:
    shown = [("random", "first_mask", "clean", "a random mask"), ("random", "worst_mask", "ink", "worst random mask")]
    shown += [(who, "first_mask", _WHO[who][0], f"{_WHO[who][1]} mask") for who in ("learned", "transfer")]
    for who, which, color, label in shown:
        if who in told:
            entry = told[who]["similarity"][which]
            axes.stairs(entry["counts"], entry["edges"], color=COLOURS[color], label=label)
    axes.set(xlabel="cosine of attention", ylabel="images")


def _draw_accuracy(axes: Any, told: Mapping[str, Any], clean: float) -> None:
    curve = told["random"]["accuracy"]["curve"]
    places = range(1, len(curve) + 1)
    axes.plot(places, [100 * each for each in curve], color=COLOURS["clean"], label="random, in order")
    axes.axhline(100 * clean, color=COLOURS["muted"], linestyle=":", linewidth=1, label="clean images")
    for who in ("learned", "transfer"):
        if who in told:
            color, name = _WHO[who]
            axes.axhline(100 * told[who]["accuracy"]["mean"], color=COLOURS[color], linewidth=1, label=name)
    lowest = min(100 * curve[0], *(line.get_ydata()[0] for line in axes.lines))
    axes.set(xlabel="an image's masks, worst first", ylabel="accuracy, %", ylim=(max(0, lowest - 5), 101))
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_drift(axes: Any, told: Mapping[str, Any]) -> None:
    for who, (color, name) in _WHO.items():
        if who in told:
            entry = told[who]["drift"]
            places = range(1, len(entry["median"]) + 1)
            axes.fill_between(places, entry["lower"], entry["upper"], color=COLOURS[color], alpha=0.15, linewidth=0)
            axes.plot(places, entry["median"], color=COLOURS[color], label=name)
    axes.set(xlabel="block", ylabel="|F(x') - F(x)| / |F(x)|")
    axes.xaxis.get_major_locator().set_params(integer=True)


def stability_tables(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Accuracy under masks, then similarity and drift, one row for each way of choosing patches."""
    masks = told["masks"]
    accuracy, nearness = [], []
    for who, (_, name) in _WHO.items():
        if who not in told:
            continue
        part = told[who]
        seen, near = part["accuracy"], part["similarity"]
        several = who == "random" and masks > 1
        ends = [f"{percent(seen[end]['accuracy'])} ({interval_text(seen[end]['ci95'])})" for end in ("worst", "best")]
        quartiles = " / ".join(percent(each) for each in seen["quartiles"])
        accuracy.append(
            [name, f"{percent(seen['mean'])} ({interval_text(seen['ci95'])})"]
            + ([ends[0], quartiles, ends[1]] if several else ["", "", ""])
        )
        nearness.append(
            [
                name,
                f"{near['mean']:.3f} ({near['ci95'][0]:.3f} to {near['ci95'][1]:.3f})",
                f"{near['worst_mask']['mean']:.3f}" if several else "",
                f"{part['drift']['median'][-1]:.3f}",
            ]
        )
    return [
        {
            "caption": f"Accuracy with noise in {told['corrupted']} of {told['patches']} patches. Worst, quartiles and "
            f"best are by image: of its {masks} random masks the worst, then those a quarter, half and three quarters "
            "up the order, and the best.",
            "headings": ["patches", "mean over masks", f"worst of {masks}", "quartiles", f"best of {masks}"],
            "rows": accuracy,
        },
        {
            "caption": f"Cosine with the clean image: {_SIMILARITIES[told['similarity']]}, a mean over heads, "
            f"layers and, for random patches, {told['watched']} masks (others are chosen once); and how far the last "
            "block's features went, likewise.",
            "headings": ["patches", "cosine of attention", "worst mask of each image", "drift, last block"],
            "rows": nearness,
        },
    ]


def stability_remarks(told: Mapping[str, Any]) -> list[str]:
    by_mask = told["random"]["accuracy"]["by_mask"]
    remarks = [
        f"Another reading of accuracy over masks, one random mask for every image, gives {percent(by_mask['lowest'])} "
        f"to {percent(by_mask['highest'])}: with many images these agree for every model and say nothing about it."
    ]
    if "learned" in told:
        remarks.append(
            "Learned patches are those of a corruption model trained against this very model, once, on other images; "
            "what another training of it would choose is not in the interval."
        )
    return remarks


def stability_sentence(results: Mapping[str, Any]) -> str:
    told, clean = results["stability"], results["clean"]
    seen, near = told["random"]["accuracy"], told["random"]["similarity"]
    sentence = (
        f"Of {told['n']:,} images {percent(clean['accuracy'])} are classified correctly; with noise in "
        f"{told['corrupted']} of {told['patches']} patches {percent(seen['mean'])} on average, "
        f"{percent(seen['worst']['accuracy'])} under the worst of {told['masks']} random masks"
    )
    if "learned" in told:
        sentence += f" and {percent(told['learned']['accuracy']['mean'])} under learned ones"
    return f"{sentence}. The cosine of attention with that of the clean image is {near['mean']:.2f} on average."


def show_stability(results: Mapping[str, Any]) -> None:
    """The tables in the terminal."""
    console, told = Console(), results["stability"]
    console.print(escape(stability_sentence(results)))
    for each in stability_tables(told):
        table = Table(*each["headings"], title=each["caption"], title_justify="left")
        for row in each["rows"]:
            table.add_row(*map(escape, row))
        console.print(table)
    for entry in results["attacks"]:
        interval = interval_text(entry["ci95"])
        console.print(f"{escape(entry['name'])}: {percent(entry['robust_accuracy'])} ({interval}), this attack alone")
    for remark in stability_remarks(told):
        console.print(f"[dim]{escape(remark)}[/]")
