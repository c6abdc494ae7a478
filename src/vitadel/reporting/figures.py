"""What all figures of a report share: PNG and SVG files, colors, axes, and rows of small images.

SVG on a page takes the colors and fonts of the page around it. Only matplotlib's object interface is used, so drawing
changes nothing in a notebook that imports this.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter
from PIL import Image

from vitadel.quantities import printable, shorten
from vitadel.reporting.read_runs import Array

COLORS = {
    "ink": "#20242c",
    "muted": "#667080",
    "grid": "#dfe3e8",
    "clean": "#6d8fc4",
    "attack": "#d9974a",
    "worst": "#a8353f",
}
"""Of light mode. The page sets `--figure-<name>` to others in dark mode; the SVG falls back on these."""

WIDTH = 700  # points, as are all lengths below
_STYLE: dict[str, Any] = {
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "image.composite_image": False,  # or SVG would merge the small images into one large one
    "svg.fonttype": "none",
    "svg.hashsalt": "vitadel",
}

_NO_ORIGIN = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@contextmanager
def _figure_style() -> Iterator[None]:
    """Draw the same picture whatever the user's matplotlibrc says, without warnings about missing glyphs."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# What no XML file may hold.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Picture:
    """A figure and its alternative text."""

    name: str
    figure: Figure
    alt: str

    def png(self) -> bytes:
        return self._saved(format="png", dpi=180, facecolor="white", metadata={"Software": None})

    def svg_file(self) -> bytes:
        """SVG as a file of its own."""
        return self._saved(format="svg", metadata={**_NO_ORIGIN, "Description": printable(self.alt)})

    def svg(self, prefix: str) -> str:
        """SVG markup inside HTML; `prefix` keeps its ids apart from those of other figures on the page."""
        drawn = self._saved(format="svg", transparent=True, metadata=_NO_ORIGIN)
        return _for_page(ElementTree.fromstring(drawn), prefix)

    def _saved(self, **how: Any) -> bytes:
        buffer = io.BytesIO()
        # Names of models and classes are never formulas; powers on a logarithmic axis are.
        powers = {
            label
            for axes in self.figure.axes
            for axis in (axes.xaxis, axes.yaxis)
            if isinstance(axis.get_major_formatter(), LogFormatter)
            for label in axis.get_ticklabels(which="both")
        }
        for text in self.figure.findobj(Text):
            text.set_text(_ILLEGAL.sub("\ufffd", text.get_text()))
            text.set_parse_math(text in powers)
        with _figure_style():
            self.figure.savefig(buffer, **how)
        content = buffer.getvalue()
        if how["format"] != "svg":
            return content
        return _ILLEGAL.sub("\ufffd", content.decode("utf-8", "replace")).encode()


def _for_page(root: ElementTree.Element, prefix: str) -> str:
    """Drop what inline SVG does not need, and let the page choose colors and fonts."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        for name in list(element.attrib):
            value = element.attrib.pop(name)
            plain = name.rpartition("}")[2]  # without the XML namespace: `href`, not `xlink:href`
            if plain == "id" and element.tag == "g":
                continue
            if plain == "id":
                value = prefix + value
            elif plain in ("href", "clip-path"):
                value = value.replace("#", f"#{prefix}", 1) if value.startswith(("#", "url(#")) else value
                value = "".join(value.split())  # matplotlib begins the bytes of an image on a new line
            elif plain == "style":
                value = _themed(value)
            element.set(plain, value)
    for name in ("width", "height", "version"):
        del root.attrib[name]
    return ElementTree.tostring(root, encoding="unicode")


def _themed(style: str) -> str:
    kept = [part for part in style.split(";") if not part.strip().startswith("font-family")]
    style = ";".join(kept)
    for name, color in COLORS.items():
        style = style.replace(color, f"var(--figure-{name}, {color})")
    return style


_PNG = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]{26000,})")  # none of 64 pixels, whose every pixel can be seen
_QUALITY = 85


def lighten_images(markup: str) -> str:
    """The same figure with large opaque images as JPEG where that is shorter; faint perturbations may get lost."""
    return _PNG.sub(lambda found: min(found[0], _as_jpeg(found[1]) or found[0], key=len), markup)


def _as_jpeg(png: str) -> str | None:
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        if "A" in image.mode and image.getchannel("A").getextrema() != (255, 255):
            return None
        buffer = io.BytesIO()
        # Without subsampling: enlarged perturbations are colored noise.
        image.convert("RGB").save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


@contextmanager
def new_figure(height: float) -> Iterator[Any]:
    """A figure of this height in points, to be drawn in the style of the report."""
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    FigureCanvasAgg(figure)
    with _figure_style():
        yield figure


def style_axes(axes: Any) -> None:
    """Two thin lines and muted numbers."""
    axes.tick_params(labelcolor=COLORS["muted"], color=COLORS["grid"], labelsize=9)
    axes.xaxis.label.set_color(COLORS["muted"])
    axes.yaxis.label.set_color(COLORS["muted"])
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(COLORS["grid"])


def add_legend(place: Any, *entries: Any, fontsize: int = 9, **how: Any) -> Any:
    """A legend of axes or of a figure."""
    return place.legend(*entries, frameon=False, fontsize=fontsize, labelcolor=COLORS["muted"], **how)


def interval_reach(entries: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """How far the 95 % intervals reach below and above their values, in percent, for error bars."""
    low = [max(0.0, 100 * (entry[name] - entry["ci95"][0])) for entry in entries]
    high = [max(0.0, 100 * (entry["ci95"][1] - entry[name])) for entry in entries]
    return [low, high]


@dataclass(frozen=True)
class Strip:
    """A row of small images: a title before it, images (h, w, 3) or maps (h, w), and a short note below each."""

    title: str
    images: Sequence[Array]
    notes: Sequence[str] = ()
    largest: float | None = None  # the value of a map that has the full color; by default each map's own largest
    scale: Mapping[str, Any] | None = None  # colors of maps, instead of those from 0 to `largest`


_LEFT, _GAP, _NOTE, _LARGEST = 110, 4, 13, 84


def as_images(arrays: Array) -> list[Array]:
    """(n, 3, h, w) as images (h, w, 3)."""
    return list(arrays.transpose(0, 2, 3, 1))


def _side(strips: Sequence[Strip]) -> float:
    most = max(len(strip.images) for strip in strips)
    return float(min((WIDTH - _LEFT) / max(most, 1), _LARGEST)) - _GAP


@contextmanager
def strip_figure(strips: Sequence[Strip], below: float = 12) -> Iterator[Any]:
    """A new figure with strips of images, and so many points of room below them."""
    side = _side(strips)
    height = 6 + sum(side + _GAP + (_NOTE if strip.notes else 0) for strip in strips) + below
    with new_figure(height) as figure:
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0), autoscale_on=False, zorder=-1)
        axes.set_axis_off()
        top = 6.0
        for strip in strips:
            _draw_strip(axes, strip, top, side)
            top += side + _GAP + (_NOTE if strip.notes else 0)
        yield figure


def _draw_strip(axes: Any, strip: Strip, top: float, side: float) -> None:
    style: dict[str, Any] = {"va": "center", "parse_math": False}  # a dollar sign in a class name is a dollar sign
    axes.text(4, top + side / 2, shorten(strip.title, 20), ha="left", fontsize=9, color=COLORS["ink"], **style)
    for place, image in enumerate(strip.images):
        left = _LEFT + place * (side + _GAP)
        box = (left, left + side, top + side, top)
        scale = {} if image.ndim == 3 else strip.scale or {"cmap": "magma", "vmin": 0, "vmax": _full(strip, image)}
        axes.imshow(image, interpolation="none", aspect="auto", extent=box, clip_on=False, **scale)
    for place, note in enumerate(strip.notes):
        middle = _LEFT + place * (side + _GAP) + side / 2
        words = shorten(note, max(4, round(side / 5)))
        axes.text(middle, top + side + 7, words, ha="center", fontsize=8, color=COLORS["muted"], **style)


def _full(strip: Strip, image: Array) -> float:
    return max(float(image.max()) if strip.largest is None else strip.largest, 1e-12)
