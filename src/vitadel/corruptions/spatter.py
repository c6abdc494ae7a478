"""Spatter: drops of water or mud on the lens, on 8-bit images (n, 3, height, width).

Water needs edges (Canny 1986), chamfer distances (Borgefors 1986) and histogram equalization. These are implemented
here in integers, for batches, with the conventions of OpenCV.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.corruptions.filtering import FLOAT32_SLACK, smooth, to_bytes
from vitadel.corruptions.randomness import normal_field
from vitadel.runtime.rng import SampleRNG

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FARTHEST = 20
_UNIT = 1 << 16  # distances are in whole numbers of this
_EXACT = {1: _UNIT, 2: round(1.4 * _UNIT), 5: round(2.1969 * _UNIT)}  # costs of steps, by the square of their length
# Costs that fit 16 bits and order all shortest paths up to `_FARTHEST` as the exact ones do.
_SHORT = {1: 843, 2: 1180, 5: 1851}
_STEPS = [
    (down, right, _SHORT[down**2 + right**2])
    for down in range(-2, 3)
    for right in range(-2, 3)
    if down**2 + right**2 in _SHORT
]
_TANGENT = round(0.4142135623730950488 * (1 << 15))  # of 22.5 degrees
_BESIDE = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if down or right]

Whole = NDArray[np.integer[Any]]


def spatter(
    pixels: Tensor,
    rng: SampleRNG,
    loc: float,
    scale: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: float,
) -> Tensor:
    """Cover the image where smoothed noise exceeds a threshold; `mud` is 1 or 0, `strength` the opacity of water or the
    blur of mud."""
    layer = liquid(normal_field(rng, 1, *pixels.shape[2:]).mul_(scale).add_(loc), sigma, threshold)
    return _add_mud(pixels, layer, strength) if mud else add_water(pixels, layer, strength)


def liquid(noise: Tensor, sigma: float, threshold: float) -> Tensor:
    """Smooth noise (n, 1, height, width) and set it to zero below the threshold."""
    layer = smooth(noise, sigma)
    return layer.masked_fill_(layer < threshold, 0)


def _add_mud(pixels: Tensor, layer: Tensor, sigma: float) -> Tensor:
    cover = smooth((layer > 0).float(), sigma)
    cover.masked_fill_(cover < 0.8, 0)
    color = torch.tensor(_MUD)[:, None, None] * 255
    return to_bytes((1 - cover).mul(pixels).add_(cover * color), FLOAT32_SLACK)


def add_water(pixels: Tensor, layer: Tensor, strength: float) -> Tensor:
    """Add water lit from one side; its relief is the distance from the edges of the drops."""
    wet = (layer * 255).to(torch.uint8)[:, 0]
    relief = _sum_of_nine(chamfer(edges(wet, 50, 150)).numpy()) // (9 * _UNIT)
    lit = np.clip(_emboss(equalize(torch.from_numpy(relief)).numpy()), 0, 255)
    soft = (2 * _sum_of_nine(lit) + 9) // 18  # the mean, rounded
    shine = torch.from_numpy(np.multiply(soft, wet.numpy(), dtype=np.int32)).float()
    brightest = shine.amax((1, 2), keepdim=True)
    shine = shine.div_(brightest.masked_fill_(brightest == 0, 1)).mul_(strength)[:, None]
    color = torch.tensor(_WATER)[:, None, None]
    return to_bytes((shine * color).mul_(255).add_(pixels), FLOAT32_SLACK)


def _pad(planes: Whole, inwards: int) -> Whole:
    """Pad by one row and column on every side, copied from `inwards` of the edge (0: the edge itself)."""
    n, height, width = planes.shape
    framed = np.empty((n, height + 2, width + 2), planes.dtype)
    framed[:, 1:-1, 1:-1] = planes
    framed[:, 0, 1:-1], framed[:, -1, 1:-1] = planes[:, inwards], planes[:, -1 - inwards]
    framed[:, :, 0], framed[:, :, -1] = framed[:, :, 1 + inwards], framed[:, :, -2 - inwards]
    return framed


def _sum_of_nine(planes: Whole) -> Whole:
    framed = _pad(planes, 1)
    tall = framed[:, :-2] + framed[:, 1:-1]
    tall += framed[:, 2:]
    total = tall[:, :, :-2] + tall[:, :, 1:-1]
    total += tall[:, :, 2:]
    return total


def _emboss(planes: Whole) -> Whole:
    """Correlate with -2 -1 0, -1 1 1, 0 1 2: lower right minus upper left."""
    framed = _pad(planes, 1)
    total = framed[:, 2:, 2:] - framed[:, :-2, :-2]
    total *= 2
    total += framed[:, 2:, 1:-1]
    total -= framed[:, :-2, 1:-1]
    total += framed[:, 1:-1, 2:]
    total -= framed[:, 1:-1, :-2]
    total += planes
    return total


def equalize(planes: Tensor) -> Tensor:
    """Equalize the histogram of levels 0 ... _FARTHEST to 0 ... 255; a flat plane does not change."""
    n, levels = len(planes), _FARTHEST + 1
    numbered = planes.flatten(1).numpy() + np.arange(0, n * levels, levels)[:, None]
    counts = np.bincount(numbered.ravel(), minlength=n * levels).reshape(n, levels)
    first = np.take_along_axis(counts, (counts > 0).argmax(1)[:, None], 1)  # the number of pixels at the lowest level
    rest = numbered.shape[1] - first
    scale = np.float32(255) / np.maximum(rest, 1).astype(np.float32)
    spread = np.rint((counts.cumsum(1) - first).astype(np.float32) * scale).clip(0, 255)
    table = np.where(rest == 0, np.arange(levels), spread).astype(np.int16)
    return torch.from_numpy(table.ravel().take(numbered)).view(planes.shape)


def edges(planes: Tensor, low: int, high: int) -> Tensor:
    """Canny edges of planes (n, height, width): ridges of the gradient above `high`, or above `low` and connected.

    Most pixels have almost no gradient; the later steps only handle the others, by their positions in memory.
    """
    framed = _pad(planes.numpy().astype(np.int16), 0)
    dx, dy, size = np.empty_like(framed), np.empty_like(framed), np.zeros_like(framed)
    inner = np.s_[:, 1:-1, 1:-1]
    tall = framed[:, :-2] + framed[:, 2:]
    tall += 2 * framed[:, 1:-1]
    wide = framed[:, :, :-2] + framed[:, :, 2:]
    wide += 2 * framed[:, :, 1:-1]
    np.subtract(tall[:, :, 2:], tall[:, :, :-2], out=dx[inner])
    np.subtract(wide[:, 2:], wide[:, :-2], out=dy[inner])
    np.add(np.abs(dx[inner]), np.abs(dy[inner]), out=size[inner])
    broad, sizes = framed.shape[2], size.ravel()
    places = np.flatnonzero(sizes > low)
    places = places[_ridges(sizes, dx.ravel()[places], dy.ravel()[places], places, broad)]
    found = _connect(places[sizes[places] > high], places, broad, len(sizes))
    return torch.from_numpy(found.reshape(size.shape)[inner])


def _ridges(sizes: Whole, dx: Whole, dy: Whole, places: Whole, broad: int) -> NDArray[np.bool_]:
    """Which places have a larger gradient than their two neighbors across the edge."""
    run, rise = np.abs(dx.astype(np.int32)), np.abs(dy.astype(np.int32)) << 15
    flat = run * _TANGENT
    level, steep = rise < flat, rise > flat + (run << 16)
    slanted = np.where((dx ^ dy) < 0, broad - 1, broad + 1)
    across = np.where(level, 1, np.where(steep, broad, slanted))
    here = sizes[places]
    # Of two equal neighbors in a row or column the first is the ridge; on a diagonal neither is.
    ridge: NDArray[np.bool_] = (here > sizes[places - across]) & (here + (level | steep) > sizes[places + across])
    return ridge


def _connect(front: Whole, places: Whole, broad: int, count: int) -> NDArray[np.bool_]:
    """Mark the `front` and all `places` connected to it."""
    found, waiting = np.zeros(count, bool), np.zeros(count, bool)
    waiting[places] = True
    beside = np.array([down * broad + right for down, right in _BESIDE])
    while len(front):
        found[front], waiting[front] = True, False
        near = (front[:, None] + beside).ravel()
        front = np.unique(near[waiting[near]])
    return found


@cache
def _exact_distances() -> NDArray[np.int32]:
    """Exact distances by short distance. A shortest path only has knight steps and one other kind of step."""
    far = _FARTHEST * _SHORT[1]
    table = np.full(far + 1, _FARTHEST * _UNIT, np.int32)
    for other in (1, 2):
        for knight, steps in product(range(_FARTHEST), repeat=2):
            short = knight * _SHORT[5] + steps * _SHORT[other]
            if short < far:
                table[short] = knight * _EXACT[5] + steps * _EXACT[other]
    return table


def chamfer(sources: Tensor) -> Tensor:
    """Distances to the nearest source by king and knight steps, at most `_FARTHEST`, in `_UNIT`s, (n, height, width).

    A shortest path may take its steps in any order, so all steps of one direction are taken together: runs of 1, 2, 4
    ... steps give every number of them.
    """
    far = _FARTHEST * _SHORT[1]
    n, height, width = sources.shape
    # Each image is one line in memory, and a step is a shift of that line. Shifts cross the ends of rows, which are
    # padded so that no path from one row to the next counts.
    broad = width + _FARTHEST
    field = np.full((n, height, broad), far, np.uint16)
    np.copyto(field[:, :, :width], 0, where=sources.numpy())
    lines = field.reshape(n, -1)
    spare = np.empty_like(lines)
    for down, right, cost in _STEPS:
        run = 1
        while run * cost < far:
            shift = (down * broad + right) * run
            ahead, behind = lines[:, abs(shift) :], lines[:, : -abs(shift)]
            target, origin = (ahead, behind) if shift > 0 else (behind, ahead)
            reached = spare[:, : target.shape[1]]
            np.add(origin, np.uint16(run * cost), out=reached)
            np.minimum(target, reached, out=target)
            run *= 2
    return torch.from_numpy(_exact_distances().take(field[:, :, :width]))
