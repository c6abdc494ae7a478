"""Blur: defocus, glass, motion, zoom and Gaussian, on 8-bit images (n, 3, height, width)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vitadel.corruptions.filtering import (
    FLOAT32_SLACK,
    blur_along,
    correlate,
    disk,
    smooth,
    to_bytes,
    zoom_and_crop,
    zoom_crop,
)
from vitadel.corruptions.randomness import between, words
from vitadel.runtime.rng import SampleRNG


def gaussian_blur(pixels: Tensor, rng: SampleRNG, sigma: float) -> Tensor:
    """Blur each channel, with the kernel truncated at 4 sigmas and replicated edges."""
    return to_bytes(smooth(pixels.float(), sigma), FLOAT32_SLACK)


def defocus_blur(pixels: Tensor, rng: SampleRNG, radius: float, alias_sigma: float) -> Tensor:
    """Blur with a disk as aperture; below radius 1 only its smoothing remains."""
    return correlate(pixels, disk(radius, alias_sigma))


def motion_blur(pixels: Tensor, rng: SampleRNG, radius: float, sigma: float) -> Tensor:
    """ImageMagick's one-sided blur along a ray within 45 degrees of the horizontal, which also shifts the image.

    Values are truncated to whole levels, as in the package imagecorruptions. Snow and sequences round them, as
    ImageMagick does.
    """
    return blur_along(pixels, between(rng, -45, 45), radius, sigma)


def zoom_blur(pixels: Tensor, rng: SampleRNG, stop: float, step: float) -> Tensor:
    """The mean of the image and its enlargements by 1, 1 + step, ... up to `stop`, as `numpy.arange` rounds it."""
    size = (pixels.shape[2], pixels.shape[3])
    image = pixels.float().div_(255)
    wide = image.double()
    total = torch.zeros_like(image)
    zooms = np.arange(1, stop, step).tolist()
    shapes = [_shape(size, zoom) for zoom in zooms]
    layer = image
    for zoom, (before, shape) in zip(zooms, pairwise([None, *shapes]), strict=True):
        if shape != before:  # on small images several factors give the same enlargement
            rows, columns = zoom_crop(size, zoom)
            layer = zoom_and_crop(wide[:, :, rows, columns], zoom, size).float()
        total.add_(layer)
    return to_bytes(total.add_(image).div_(len(zooms) + 1).mul_(255))


def _shape(size: tuple[int, int], zoom: float) -> list[tuple[int, int]]:
    """(length of the crop, enlarged length) of both sides, which determine the enlargement."""
    crops = [math.ceil(length / zoom) for length in size]
    return [(crop, round(crop * zoom)) for crop in crops]


def glass_blur(pixels: Tensor, rng: SampleRNG, sigma: float, reach: float, rounds: float) -> Tensor:
    """Blur, displace pixels at random, blur. As in the benchmark, pixels are copied where swapping was intended."""
    n, _, height, width = pixels.shape
    soft = to_bytes(smooth(pixels.float(), sigma), FLOAT32_SLACK).flatten(2)
    for turn in range(int(rounds)):
        offsets = glass_offsets(rng.stream("round", turn), int(reach), height, width)
        places = shuffle_positions(offsets, int(reach), height, width)
        soft = soft.gather(2, places[:, None].expand(n, 3, height * width))
    return to_bytes(smooth(soft.view_as(pixels).float(), sigma), FLOAT32_SLACK)


def glass_offsets(rng: SampleRNG, reach: int, height: int, width: int) -> Tensor:
    """(down, right) from -reach to reach - 1 for each pixel that moves, (n, 2, rows, columns).

    The benchmark excludes the upper bound too, which shifts images to the lower right.
    """
    side = [max(length - 2 * reach, 0) for length in (height, width)]
    bits = words(rng, 2, *side).to(torch.int64)
    return ((bits + 2**31) * (2 * reach) >> 32) - reach


def shuffle_positions(offsets: Tensor, reach: int, height: int, width: int) -> Tensor:
    """The flat position each pixel's value comes from, when pixels are copied one after another from the bottom right.

    A pixel that copies from an already visited one (further down, or right in the same row) gets its new value, from
    any other the initial value. Chains of the first kind lead to the origin; all of them are followed at once, in steps
    that double.
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
