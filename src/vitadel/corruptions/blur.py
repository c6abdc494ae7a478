"""Blur: defocus, glass, motion, zoom and Gaussian, on 8-bit images (n, 3, height, width)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vitadel.corruptions.filtering import (
    FLOAT32_SLACK,
    blurred_along,
    bytes_below,
    clipped_zoom,
    correlate,
    disk,
    smoothed,
    zoom_crop,
)
from vitadel.corruptions.randomness import between, words
from vitadel.runtime.rng import SampleRNG

__all__ = [
    "defocus_blur",
    "gaussian_blur",
    "glass_blur",
    "glass_offsets",
    "motion_blur",
    "shuffled_positions",
    "zoom_blur",
]


def gaussian_blur(pixels: Tensor, rng: SampleRNG, sigma: float) -> Tensor:
    """Each channel on its own, kernel cut at 4 sigmas, edges replicated."""
    return bytes_below(smoothed(pixels.float(), sigma), FLOAT32_SLACK)


def defocus_blur(pixels: Tensor, rng: SampleRNG, radius: float, alias_sigma: float) -> Tensor:
    """A disk for an aperture; below radius 1 only its softening remains."""
    return correlate(pixels, disk(radius, alias_sigma))


def motion_blur(pixels: Tensor, rng: SampleRNG, radius: float, sigma: float) -> Tensor:
    """ImageMagick's one-sided blur along a ray within 45 degrees of the horizontal: the picture also drifts.

    Fractions of a level are cut off, as by the package imagecorruptions. Snow and sequences round them, as ImageMagick
    does itself.
    """
    return blurred_along(pixels, between(rng, -45, 45), radius, sigma)


def zoom_blur(pixels: Tensor, rng: SampleRNG, stop: float, step: float) -> Tensor:
    """The mean of the image and its enlargements by 1, 1 + step, ...; whether `stop` is one of them floats decide."""
    size = (pixels.shape[2], pixels.shape[3])
    image = pixels.float().div_(255)
    wide = image.double()
    total = torch.zeros_like(image)
    zooms = np.arange(1, stop, step).tolist()
    shapes = [(_shape(size, zoom)) for zoom in zooms]
    layer = image
    for zoom, (before, shape) in zip(zooms, pairwise([None, *shapes]), strict=True):
        if shape != before:  # on small images several factors round to the same enlargement
            rows, columns = zoom_crop(size, zoom)
            layer = clipped_zoom(wide[:, :, rows, columns], zoom, size).float()
        total.add_(layer)
    return bytes_below(total.add_(image).div_(len(zooms) + 1).mul_(255))


def _shape(size: tuple[int, int], zoom: float) -> list[tuple[int, int]]:
    """(length of the crop, length when enlarged) along both sides: all that an enlargement depends on."""
    crops = [math.ceil(length / zoom) for length in size]
    return [(crop, round(crop * zoom)) for crop in crops]


def glass_blur(pixels: Tensor, rng: SampleRNG, sigma: float, reach: float, rounds: float) -> Tensor:
    """Blur, pixels displaced at random, blur. The benchmark meant to swap pixels and copies them; so does this."""
    n, _, height, width = pixels.shape
    soft = bytes_below(smoothed(pixels.float(), sigma), FLOAT32_SLACK).flatten(2)
    for turn in range(int(rounds)):
        offsets = glass_offsets(rng.stream("round", turn), int(reach), height, width)
        places = shuffled_positions(offsets, int(reach), height, width)
        soft = soft.gather(2, places[:, None].expand(n, 3, height * width))
    return bytes_below(smoothed(soft.view_as(pixels).float(), sigma), FLOAT32_SLACK)


def glass_offsets(rng: SampleRNG, reach: int, height: int, width: int) -> Tensor:
    """(down, right) from -reach to reach - 1 for each pixel that moves, (n, 2, rows, columns).

    The upper bound is missing in the benchmark too: pictures creep to the lower right.
    """
    side = [max(length - 2 * reach, 0) for length in (height, width)]
    bits = words(rng, 2, *side).to(torch.int64)
    return ((bits + 2**31) * (2 * reach) >> 32) - reach


def shuffled_positions(offsets: Tensor, reach: int, height: int, width: int) -> Tensor:
    """From which flat position each pixel's value comes, when pixels copy one after another from the bottom right.

    A pixel copies from one that has been visited before it (so: further down, or right in the same row) what that one
    holds by now, and from any other what it held at the start. Following the first kind of step until it ends gives
    the origin; all chains are followed at once, in steps that double.
    """
    n = len(offsets)
    position = torch.arange(height * width).view(height, width)
    moving = slice(reach + 1, height - reach + 1), slice(reach + 1, width - reach + 1)
    origin = position.expand(n, height, width).clone()
    origin[:, moving[0], moving[1]] += offsets[:, 0] * width + offsets[:, 1]
    origin = origin.view(n, -1)
    visited = torch.zeros(height, width, dtype=torch.bool)
    visited[moving] = True
    position = position.flatten()
    follows = (origin > position) & visited.flatten().take(origin)
    onward = torch.where(follows, origin, position)
    while True:
        further = onward.gather(1, onward)
        if torch.equal(further, onward):
            return origin.gather(1, onward)
        onward = further
