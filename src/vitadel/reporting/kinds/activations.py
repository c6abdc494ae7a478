"""Massive activations: the largest activations of every layer, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import NullFormatter, StrMethodFormatter

from vitadel.quantities import percent
from vitadel.reporting.figures import COLORS, Picture, add_legend, new_figure, style_axes
from vitadel.reporting.kind import Kind, Section
from vitadel.reporting.read_runs import Run
from vitadel.reporting.tables import Column, Table

_COLOR = {"clean": "clean", "attacked": "worst", "adaptive": "attack"}


def draw_activations(run: Run) -> Picture:
    """Median and quartiles per layer, one curve per condition."""
    found = run.results["activations"]
    places = range(len(found["layers"]))
    with new_figure(300) as figure:
        axes = figure.add_axes((0.09, 0.15, 0.88, 0.8))
        for entry in reversed(found["conditions"]):  # clean ones on top, where curves coincide
            color = COLORS[_COLOR[entry["images"]]]
            style = "--" if entry["tokens"] else "-"
            axes.fill_between(places, entry["lower"], entry["upper"], color=color, alpha=0.15, linewidth=0)
            axes.plot(places, entry["median"], color=color, linestyle=style, linewidth=1.5, label=entry["name"])
        axes.set(yscale="log", xlabel="block (0: input of the first)", ylabel="largest |activation|")
        axes.xaxis.get_major_locator().set_params(integer=True)
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(StrMethodFormatter("{x:g}") if high < 20 * low else NullFormatter())
        add_legend(axes, reverse=True)
        style_axes(axes)
        axes.tick_params(which="minor", labelcolor=COLORS["muted"], color=COLORS["grid"], labelsize=9)
    return Picture("activations", figure, f"Largest activation of each layer. {activations_sentence(run)}")


def activations_sentence(run: Run) -> str:
    """The layer with the largest clean median, and the medians there under every condition."""
    found = run.results["activations"]
    clean = found["conditions"][0]["median"]
    peak = max(range(len(clean)), key=clean.__getitem__)
    sizes = ", ".join(f"{entry['name']} {_size(entry['median'][peak])}" for entry in found["conditions"])
    warning = f" Beware: {found['warning']}." if found["warning"] else ""
    return (
        f"Over {found['n']:,} images the largest activations are in {found['layers'][peak]}; medians there: {sizes} "
        f"(attack {found['attack']['name']}; registers and robustness tokens do not count).{warning}"
    )


def activations_tables(found: Mapping[str, Any]) -> list[Table]:
    """Sizes and places of the maxima, one row per layer and one column per condition."""
    columns = (Column("layer"), *(Column(entry["name"]) for entry in found["conditions"]))
    sizes = tuple(
        (
            layer,
            *(
                f"{_size(entry['median'][number])} ({_size(entry['lower'][number])} to {_size(entry['upper'][number])})"
                for entry in found["conditions"]
            ),
        )
        for number, layer in enumerate(found["layers"])
    )
    places = tuple(
        (layer, *(_place(entry["places"][number]) for entry in found["conditions"]))
        for number, layer in enumerate(found["layers"])
    )
    attack = found["attack"]
    eps = f", eps {attack['settings']['effective_eps']}" if attack["settings"].get("effective_eps") else ""
    return [
        Table(f"Largest |activation|: median (quartiles). Attack {attack['name']}{eps}.", columns, sizes),
        Table("Where most maxima are (share of images).", columns, places),
    ]


def _place(place: Mapping[str, Any]) -> str:
    """The commonest kind of token, its share of images, and in how many channel, or token and channel, agree."""
    channel = f"channel {place['channel']} {percent(place['channel_share'])}"
    same = f"same token and channel {percent(place['same_place_share'])}"
    return f"{place['kind']} {percent(place['kind_share'])}, {channel}, {same}"


def _size(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _sections(run: Run) -> list[Section]:
    found = run.results["activations"]
    return [
        Section(
            "Massive activations",
            lambda: draw_activations(run),
            "Lines are medians over images, bands reach from the lower to the upper quartile. Attacks are crafted on "
            "the model without tokens, as in the paper, unless they go through the tokens. Registers and robustness "
            "tokens do not count.",
            activations_tables(found),
            warning=found["warning"],
        )
    ]


KIND = Kind(activations_sentence, _sections)
