"""Where TORA's adapters are looked at, as pictures, and what the deletion and insertion check says of them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitadel.reporting.figures import COLOURS, Picture, blank, our_style
from vitadel.reporting.read_runs import Array, Run

__all__ = ["MAPS_REMARK", "check_table", "draw_maps"]

MAPS_REMARK = (
    "The two adapters' maps sum to one at every patch by construction, whatever was learnt: that they complement each "
    "other is no finding. Deletion hides the patches that an order names first, insertion shows them first; a map that "
    "finds what matters has a smaller area than a random order in the one and a larger in the other. The robustness "
    "adapter's order is this one backwards, so that its areas are these with deletion and insertion exchanged."
)
_IMAGES, _LAYERS = 3, 7  # most that are drawn
_LEFT, _GAP, _HEAD, _FOOT, _WIDTH = 120, 4, 22, 30, 700  # points


def draw_maps(run: Run) -> Picture | None:
    """Images down, one row for each model; layers across. Colours are centred at one half; None without maps."""
    arrays = _read(run)
    if arrays is None:
        return None
    images = arrays.pop("x").transpose(0, 2, 3, 1)[:_IMAGES]
    maps = {name.removeprefix("maps:"): each[:, :_IMAGES] for name, each in arrays.items()}
    depth = min(len(each) for each in maps.values())
    layers = np.unique(np.linspace(0, depth - 1, min(depth, _LAYERS)).round().astype(int)).tolist()
    far = max(float(np.abs(each[layers] - 0.5).max()) for each in maps.values())
    scale = {"cmap": "RdBu", "vmin": 0.5 - max(far, 1e-6), "vmax": 0.5 + max(far, 1e-6)}
    side = min((_WIDTH - _LEFT) / (len(layers) + 1), 90) - _GAP
    height = _HEAD + len(images) * len(maps) * (side + _GAP) + _FOOT
    with our_style():
        figure = blank(height)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(height, 0), autoscale_on=False)
        axes.set_axis_off()
        style: dict[str, Any] = {"va": "center", "fontsize": 9, "parse_math": False}
        titles = ["image", *(f"block {layer + 1}" for layer in layers)]
        for column, title in enumerate(titles):
            middle = _LEFT + column * (side + _GAP) + side / 2
            axes.text(middle, _HEAD / 2, title, ha="center", color=COLOURS["muted"], **style)
        top = float(_HEAD)
        for number, image in enumerate(images):
            for name, found in maps.items():
                axes.text(4, top + side / 2, _short(name), ha="left", color=COLOURS["ink"], **style)
                for column, cell in enumerate((image, *found[layers, number])):
                    left = _LEFT + column * (side + _GAP)
                    box = (left, left + side, top + side, top)
                    colors = {} if cell.ndim == 3 else scale
                    axes.imshow(cell, interpolation="none", aspect="auto", extent=box, clip_on=False, **colors)
                top += side + _GAP
        bar = axes.inset_axes((_LEFT, height - 20, 160, 8), transform=axes.transData)
        bar.imshow(np.linspace(0, 1, 64)[None], cmap=scale["cmap"], aspect="auto")
        bar.set_axis_off()
        words = f"{scale['vmin']:.3f} (robustness)  to  {scale['vmax']:.3f} (accuracy), white is 0.5"
        axes.text(_LEFT + 168, height - 16, words, ha="left", color=COLOURS["muted"], **style)
    alt = f"The accuracy adapter's share at every patch, of {len(images)} images, for {', '.join(maps)}, by block."
    return Picture("adapter-maps", figure, f"{alt} It reaches {far:.3f} away from one half.")


def check_table(maps: Mapping[str, Any]) -> dict[str, Any]:
    """Areas of the deletion and insertion curves by order, and the map's difference from the others."""
    rows = []
    for entry in maps["contenders"]:
        for kind in ("deletion", "insertion"):
            areas = [_mean(entry[kind][name]) for name in ("map", "attention", "random")]
            differences = [_mean(entry[f"{kind}_differences"][f"map - {name}"]) for name in ("random", "attention")]
            rows.append([entry["name"], kind, *areas, *differences])
    return {
        "caption": f"Area under the probability of the model's own answer, over {maps['n']} images, with bootstrapped "
        "95 % intervals. The map is the mean of all blocks'; attention is the class token's in the last block.",
        "headings": ["model", "check", "map", "attention", "random", "map - random", "map - attention"],
        "rows": rows,
    }


def _read(run: Run) -> dict[str, Array] | None:
    try:
        with (run.path / "maps.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return found if "x" in found and len(found) > 1 else None


def _mean(entry: Mapping[str, Any]) -> str:
    low, high = entry["ci95"]
    return f"{entry['mean']:.3f} ({low:.3f} to {high:.3f})"


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"…{name[-17:]}"
