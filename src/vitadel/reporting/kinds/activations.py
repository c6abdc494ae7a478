"""Massive activations as a figure, a table and a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import NullFormatter, StrMethodFormatter

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.kinds.training import plain_axes
from vitadel.reporting.read_runs import Run, percent

__all__ = ["activations_sentence", "draw_activations", "place_text", "size_text", "where_rows"]

_COLOUR = {"clean": "clean", "attacked": "worst", "adaptive": "attack"}


def draw_activations(run: Run) -> Picture | None:
    """Median and quartiles per layer, one curve per condition; None for a run that did not look at them."""
    told = run.results.get("activations")
    if not told:
        return None
    places = range(len(told["layers"]))
    with our_style():
        figure = blank(300)
        axes = figure.add_axes((0.09, 0.15, 0.88, 0.8))
        for entry in reversed(told["conditions"]):  # clean ones on top, where curves coincide
            color = COLOURS[_COLOUR[entry["images"]]]
            style = "--" if entry["tokens"] else "-"
            axes.fill_between(places, entry["lower"], entry["upper"], color=color, alpha=0.15, linewidth=0)
            axes.plot(places, entry["median"], color=color, linestyle=style, linewidth=1.5, label=entry["name"])
        axes.set(yscale="log", xlabel="block (0: input of the first)", ylabel="largest |activation|")
        axes.xaxis.get_major_locator().set_params(integer=True)
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}") if high < 20 * low else NullFormatter())
        axes.legend(frameon=False, fontsize=9, labelcolor=COLOURS["muted"], reverse=True)
        plain_axes(axes)
        axes.tick_params(which="minor", labelcolor=COLOURS["muted"], color=COLOURS["grid"], labelsize=9)
    return Picture("activations", figure, f"Largest activation of each layer. {activations_sentence(told)}")


def activations_sentence(told: Mapping[str, Any]) -> str:
    """The layer with the largest clean median, in words, under every condition."""
    clean = told["conditions"][0]["median"]
    peak = max(range(len(clean)), key=clean.__getitem__)
    sizes = ", ".join(f"{entry['name']} {size_text(entry['median'][peak])}" for entry in told["conditions"])
    warning = f" Beware: {told['warning']}." if told["warning"] else ""
    return (
        f"Over {told['n']:,} images the largest activations are in {told['layers'][peak]}; medians there: {sizes} "
        f"(attack {told['attack']['name']}; registers and robustness tokens do not count).{warning}"
    )


def where_rows(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per layer, for tables: sizes and places under every condition."""
    return [
        {
            "layer": layer,
            "cells": [
                {
                    "size": f"{size_text(entry['median'][number])} "
                    f"({size_text(entry['lower'][number])} to {size_text(entry['upper'][number])})",
                    "place": place_text(entry["places"][number]),
                }
                for entry in told["conditions"]
            ],
        }
        for number, layer in enumerate(told["layers"])
    ]


def place_text(place: Mapping[str, Any]) -> str:
    """The commonest kind of token, its share of images, and in how many channel, or token and channel, agree."""
    channel = f"channel {place['channel']} {percent(place['channel_share'])}"
    same = f"same token and channel {percent(place['same_place_share'])}"
    return f"{place['kind']} {percent(place['kind_share'])}, {channel}, {same}"


def size_text(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
