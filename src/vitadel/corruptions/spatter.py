"""Spatter: drops of water or mud on the lens, on 8-bit images (n, 3, height, width).

The water needs what a computer-vision library would have: edges (Canny 1986), chamfer distances (Borgefors 1986) and
an equalised histogram. They are here in whole numbers, for batches, with the conventions of OpenCV.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitadel.corruptions.filtering import FLOAT32_SLACK, bytes_below, smoothed
from vitadel.corruptions.randomness import normal_field
from vitadel.runtime.draws import Draws

__all__ = ["chamfer", "edges", "equalised", "liquid", "spatter", "splashed"]

_WATER = (175 / 255, 238 / 255, 238 / 255)
_MUD = (63 / 255, 42 / 255, 20 / 255)
_FARTHEST = 20
_UNIT = 1 << 16  # distances are in whole numbers of this
_COSTS = {1: _UNIT, 2: round(1.4 * _UNIT), 5: round(2.1969 * _UNIT)}  # by the square of the length
_STEPS = {
    (down, right): _COSTS[down**2 + right**2]
    for down in range(-2, 3)
    for right in range(-2, 3)
    if down**2 + right**2 in _COSTS
}
_TANGENT = round(0.4142135623730950488 * (1 << 15))  # of 22.5 degrees


def spatter(
    pixels: Tensor,
    draws: Draws,
    loc: float,
    scale: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: float,
) -> Tensor:
    """Smoothed noise above a threshold is wet; `mud` is 1 or 0, `strength` the opacity of water or the blur of mud."""
    layer = liquid(normal_field(draws, 1, *pixels.shape[2:]).mul_(scale).add_(loc), sigma, threshold)
    return _muddy(pixels, layer, strength) if mud else splashed(pixels, layer, strength)


def liquid(noise: Tensor, sigma: float, threshold: float) -> Tensor:
    """Noise (n, 1, height, width) smoothed, zero below the threshold."""
    layer = smoothed(noise, sigma)
    return layer.masked_fill_(layer < threshold, 0)


def _muddy(pixels: Tensor, layer: Tensor, sigma: float) -> Tensor:
    cover = smoothed((layer > 0).float(), sigma)
    cover.masked_fill_(cover < 0.8, 0)
    colour = torch.tensor(_MUD)[:, None, None] * 255
    return bytes_below((1 - cover).mul(pixels).add_(cover * colour), FLOAT32_SLACK)


def splashed(pixels: Tensor, layer: Tensor, strength: float) -> Tensor:
    """Water, lit from one side: its relief is the distance from the edges of the drops."""
    wet = (layer * 255).to(torch.uint8)[:, 0].to(torch.int32)
    relief = _box(chamfer(edges(wet, 50, 150)).double().div_(_UNIT)).to(torch.int32)
    lit = _embossed(equalised(relief)).clamp_(0, 255)
    shine = (_box(lit.double()).round_() * wet).float()
    brightest = shine.amax((1, 2), keepdim=True)
    shine = shine.div_(brightest.masked_fill_(brightest == 0, 1)).mul_(strength)[:, None]
    colour = torch.tensor(_WATER)[:, None, None]
    return bytes_below((shine * colour).mul_(255).add_(pixels), FLOAT32_SLACK)


def _around(planes: Tensor, down: int, right: int, padded: Tensor) -> Tensor:
    """The plane shifted: what lies `down` and `right` of every pixel, of a plane that was padded by one."""
    height, width = planes.shape[1:]
    return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]


def _padded(planes: Tensor, inwards: int) -> Tensor:
    """One more row and column on every side: copies of those that lie `inwards` of the edge (0: the edge itself)."""
    for dim in (1, 2):
        last = planes.shape[dim] - 1 - inwards
        planes = torch.cat((planes.narrow(dim, inwards, 1), planes, planes.narrow(dim, last, 1)), dim)
    return planes


def _box(planes: Tensor) -> Tensor:
    """The mean of 3 x 3 pixels; whole numbers stay exact, because they are summed before they are scaled."""
    padded = _padded(planes, 1)
    tall = (padded[:, :-2] + padded[:, 1:-1]).add_(padded[:, 2:])
    return (tall[:, :, :-2] + tall[:, :, 1:-1]).add_(tall[:, :, 2:]).mul_(1 / 9)


def _embossed(planes: Tensor) -> Tensor:
    padded = _padded(planes, 1)
    total = torch.zeros_like(planes)
    for (down, right), weight in zip(
        ((-1, -1), (-1, 0), (0, -1), (0, 0), (0, 1), (1, 0), (1, 1)), (-2, -1, -1, 1, 1, 1, 2), strict=True
    ):
        total.add_(_around(planes, down, right, padded), alpha=weight)
    return total


def equalised(planes: Tensor) -> Tensor:
    """Levels 0 ... _FARTHEST spread over 0 ... 255 by how many pixels lie below; a flat plane stays as it is."""
    flat = planes.flatten(1).long()
    bins = len(flat) * (_FARTHEST + 1)
    numbered = flat + torch.arange(0, bins, _FARTHEST + 1)[:, None]
    counts = numbered.flatten().bincount(minlength=bins).view(len(flat), _FARTHEST + 1)
    below = counts.cumsum(1)
    lowest = flat.amin(1, keepdim=True)
    first = counts.gather(1, lowest)
    rest = flat.shape[1] - first
    scale = torch.tensor(255.0) / rest.float()
    levels = ((below - first).float() * scale).round().clamp_(0, 255)
    levels = torch.where(rest == 0, torch.arange(_FARTHEST + 1).float(), levels)
    return levels.gather(1, flat).to(torch.int32).view_as(planes)


def edges(planes: Tensor, low: int, high: int) -> Tensor:
    """Canny's edges of planes (n, height, width): ridges of the gradient above `high`, or above `low` beside one."""
    padded = _padded(planes.to(torch.int16), 0)
    tall = padded[:, :-2] + padded[:, 2:] + 2 * padded[:, 1:-1]
    wide = padded[:, :, :-2] + padded[:, :, 2:] + 2 * padded[:, :, 1:-1]
    dx, dy = tall[:, :, 2:] - tall[:, :, :-2], wide[:, 2:] - wide[:, :-2]
    size = dx.abs() + dy.abs()
    outside = F.pad(size, (1, 1, 1, 1))

    def beyond(down: int, right: int) -> Tensor:
        return _around(planes, down, right, outside)

    run, rise = dx.abs().to(torch.int32), dy.abs().to(torch.int32) << 15
    flat = run * _TANGENT
    across = (size > beyond(0, -1)) & (size >= beyond(0, 1))
    along = (size > beyond(-1, 0)) & (size >= beyond(1, 0))
    falling = (size > beyond(-1, -1)) & (size > beyond(1, 1))
    rising = (size > beyond(-1, 1)) & (size > beyond(1, -1))
    upwards = (dx ^ dy) < 0
    level, steep = rise < flat, rise > flat.add(run, alpha=1 << 16)
    # Masks, because choosing between truth values is slow in torch.
    slanted = (rising & upwards).logical_or_(falling & ~upwards)
    ridge = (across & level).logical_or_(along & steep).logical_or_(slanted & ~(level | steep))
    weak = ridge & (size > low)
    found = weak & (size > high)
    while True:
        grown = _spread(_spread(found, 1), 2).logical_and_(weak)
        if torch.equal(grown, found):
            return found
        found = grown


def _spread(marks: Tensor, dim: int) -> Tensor:
    """Marks, and the pixels before and after them."""
    spread, length = marks.clone(), marks.shape[dim]
    spread.narrow(dim, 1, length - 1).logical_or_(marks.narrow(dim, 0, length - 1))
    spread.narrow(dim, 0, length - 1).logical_or_(marks.narrow(dim, 1, length - 1))
    return spread


def chamfer(sources: Tensor) -> Tensor:
    """Distances to the nearest source along steps of a king and a knight, at most `_FARTHEST`, (n, height, width).

    In units of `_UNIT`. A shortest path takes its steps in any order, so all steps in one direction can be taken at
    once: runs of 1, 2, 4 ... steps make every number of them.
    """
    far = _FARTHEST * _UNIT
    n, height, width = sources.shape
    # Images lie in memory as one line each, and a step is a shift of that line. It runs over the ends of rows, which
    # are too far apart for a path from one to the next to count.
    broad = width + _FARTHEST
    field = torch.full((n, height, broad), far, dtype=torch.int32)
    field[:, :, :width].masked_fill_(sources, 0)
    lines = field.view(n, -1).numpy()
    spare = np.empty_like(lines)
    for (down, right), cost in _STEPS.items():
        run = 1
        while run * cost < far:
            shift = (down * broad + right) * run
            start, end = max(shift, 0), max(lines.shape[1] + min(shift, 0), 0)
            target, reached = lines[:, start:end], spare[:, start:end]
            np.add(lines[:, start - shift : max(end - shift, 0)], np.int32(run * cost), out=reached)
            np.minimum(target, reached, out=target)
            run *= 2
    return field[:, :, :width]
