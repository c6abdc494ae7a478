"""Rows of small pictures in a figure: images with three channels, maps with a colour scale of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitadel.reporting.figures import COLOURS, printable
from vitadel.reporting.read_runs import Array

__all__ = ["Strip", "as_images", "draw_strips", "height_of"]

_LEFT, _GAP, _NOTE, _WIDTH, _LARGEST = 110, 4, 13, 700, 84  # points


@dataclass(frozen=True)
class Strip:
    """A row: words before it, pictures (h, w, 3) in 8 bits or maps (h, w), and a short note below each."""

    title: str
    pictures: Sequence[Array]
    notes: Sequence[str] = ()
    largest: float | None = None  # the value of a map that has the full colour; by default each map's own largest


def as_images(arrays: Array) -> list[Array]:
    """(n, 3, h, w) as pictures."""
    return list(arrays.transpose(0, 2, 3, 1))


def _side(strips: Sequence[Strip]) -> float:
    most = max(len(strip.pictures) for strip in strips)
    return float(min((_WIDTH - _LEFT) / max(most, 1), _LARGEST)) - _GAP


def height_of(strips: Sequence[Strip]) -> float:
    """In points."""
    side = _side(strips)
    return sum(side + _GAP + (_NOTE if strip.notes else 0) for strip in strips)


def draw_strips(figure: Any, strips: Sequence[Strip], above: float = 6) -> None:
    """So many points below the figure's upper edge."""
    height, side = figure.get_figheight() * 72, _side(strips)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0), autoscale_on=False, zorder=-1)
    axes.set_axis_off()
    style: dict[str, Any] = {"va": "center", "parse_math": False}  # a dollar sign in a class name is a dollar sign
    top = above
    for strip in strips:
        axes.text(4, top + side / 2, _short(strip.title, 20), ha="left", fontsize=9, color=COLOURS["ink"], **style)
        for place, picture in enumerate(strip.pictures):
            left = _LEFT + place * (side + _GAP)
            box = (left, left + side, top + side, top)
            scale = {} if picture.ndim == 3 else {"cmap": "magma", "vmin": 0, "vmax": _largest(strip, picture)}
            axes.imshow(picture, interpolation="none", aspect="auto", extent=box, clip_on=False, **scale)
        for place, note in enumerate(strip.notes):
            middle = _LEFT + place * (side + _GAP) + side / 2
            words = _short(note, max(4, round(side / 5)))
            axes.text(middle, top + side + 7, words, ha="center", fontsize=8, color=COLOURS["muted"], **style)
        top += side + _GAP + (_NOTE if strip.notes else 0)


def _largest(strip: Strip, picture: Array) -> float:
    return max(float(picture.max()) if strip.largest is None else strip.largest, 1e-12)


def _short(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"
