"""Filters shared by several corruptions. They work element by element or image by image, never on a batch as one
matrix, so that results are the same, bit for bit, in any batch."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import groupby, zip_longest

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Tap = tuple[int, int, int]  # down, right, weight

FLOAT32_SLACK = 1e-4
"""Maximum error of float32 sums, on the scale of 0 to 255."""

_FIXED_BITS = 22
_FIXED_POINT = 1 << _FIXED_BITS  # 255 times this still fits 32 bits
_SHIFTS_AT_MOST = 32  # kernels with more taps are cheaper by Fourier transform
_NEGLIGIBLE = 1e-12  # a tap that changes no pixel of 8 bits


def to_bytes(values: Tensor, slack: float = 0.0) -> Tensor:
    """Clip values to 0 to 255 and truncate them to 8 bits, as the benchmark does. Works in place.

    `slack` compensates for float32 arithmetic: a flat region of level 7 may be 6.9999 after a blur.
    """
    if slack:
        values.add_(slack)
    return truncate_to_bytes(values.clamp_(0, 255))


def truncate_to_bytes(values: Tensor) -> Tensor:
    """Truncate values within 0 to 255 to 8 bits; NumPy does this several times faster than torch."""
    return torch.from_numpy(values.numpy().astype(np.uint8))


def _gaussian(sigma: float, radius: int) -> list[float]:
    """Weights for offsets 0, 1, ... radius; with the mirrored ones they sum to one."""
    raw = [math.exp(-0.5 * (i / sigma) ** 2) if sigma > 0 else float(i == 0) for i in range(radius + 1)]
    total = raw[0] + 2 * sum(raw[1:])
    return [weight / total for weight in raw]


def smooth(planes: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Gaussian blur of float planes (n, c, height, width) with replicated edges, truncated at `truncate` sigmas."""
    radius = int(truncate * sigma + 0.5)
    weights = _gaussian(sigma, radius)
    for dim in (2, 3):
        length = planes.shape[dim]
        padded = F.pad(planes, (0, 0, radius, radius) if dim == 2 else (radius, radius, 0, 0), mode="replicate")
        planes = padded.narrow(dim, radius, length) * weights[0]
        pair = torch.empty_like(planes)
        for i in range(1, radius + 1):
            torch.add(padded.narrow(dim, radius - i, length), padded.narrow(dim, radius + i, length), out=pair)
            planes.add_(pair, alpha=weights[i])
    return planes


@lru_cache(maxsize=32)
def smoothing_matrix(length: int, sigma: float, truncate: float) -> Tensor:
    """The same blur as a matrix, with mirrored edges (d c b a | a b c d): for kernels longer than the image."""
    radius = int(truncate * sigma + 0.5)
    weights = _gaussian(sigma, radius)
    matrix = np.zeros((length, length))
    rows = np.arange(length)
    for offset in range(-radius, radius + 1):
        folded = (rows + offset) % (2 * length)
        np.add.at(matrix, (rows, np.minimum(folded, 2 * length - 1 - folded)), weights[abs(offset)])
    return torch.from_numpy(matrix).float()


@lru_cache(maxsize=32)
def disk(radius: float, alias_sigma: float) -> NDArray[np.float32]:
    """A disk of equal weights, smoothed by a small Gaussian without renormalization, without its empty margin.

    Smoothing mirrors the disk where it touches the edge of its grid, so the sum is not exactly one.
    """
    reach, soft = (8, 1) if radius <= 8 else (int(radius), 2)
    line = np.arange(-reach, reach + 1)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).astype(np.float32)
    inside /= inside.sum()
    half = _gaussian(alias_sigma, soft)
    weights = np.array([*half[:0:-1], *half], np.float32)
    padded = np.pad(inside, soft, mode="reflect")
    across = sum(w * padded[:, i : i + len(line)] for i, w in enumerate(weights))
    kernel: NDArray[np.float32] = sum(w * across[i : i + len(line)] for i, w in enumerate(weights))
    used = int(np.abs(np.argwhere(kernel > _NEGLIGIBLE) - reach).max())
    return kernel[reach - used : reach + used + 1, reach - used : reach + used + 1]


def mirrored_positions(length: int, reach: int) -> Tensor:
    """Positions -reach ... length - 1 + reach, mirrored about the first and last pixel (d c b | a b c d | c b a)."""
    period = max(2 * (length - 1), 1)
    folded = torch.arange(-reach, length + reach) % period
    return torch.minimum(folded, period - folded) if length > 1 else torch.zeros_like(folded)


def correlate(pixels: Tensor, kernel: NDArray[np.float32]) -> Tensor:
    """8-bit planes (n, c, height, width) under a square kernel, with mirrored edges."""
    height, width = pixels.shape[2:]
    reach = len(kernel) // 2
    padded = pixels.index_select(2, mirrored_positions(height, reach)).index_select(3, mirrored_positions(width, reach))
    taps = np.argwhere(kernel > _NEGLIGIBLE).tolist()
    if len(taps) > _SHIFTS_AT_MOST:
        response = _response(kernel.tobytes(), *padded.shape[2:])
        values = torch.stack([_by_fourier(image, *response)[:, :height, :width] for image in padded.float()])
        return to_bytes(values, FLOAT32_SLACK)
    # In float64: a disk of few equal taps often gives a whole level, where the last digit matters.
    padded = padded.double()
    values = torch.zeros_like(pixels, dtype=torch.float64)
    for dy, dx in taps:
        values.add_(padded[:, :, dy : dy + height, dx : dx + width], alpha=float(kernel[dy, dx]))
    return to_bytes(values)


def _fourier_length(least: int) -> int:
    """The next length without prime factors above 5, for which the transform is fast."""
    while True:
        rest = least
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return least
        least += 1


@lru_cache(maxsize=16)
def _response(weights: bytes, height: int, width: int) -> tuple[Tensor, list[int]]:
    """The multiplier of Fourier transforms for the bytes of a kernel, and the padded size."""
    side = math.isqrt(len(weights) // 4)
    kernel = torch.frombuffer(bytearray(weights), dtype=torch.float32).view(side, side)
    size = [_fourier_length(length) for length in (height, width)]
    return torch.fft.rfft2(kernel, s=size).conj(), size


def _by_fourier(image: Tensor, response: Tensor, size: list[int]) -> Tensor:
    result: Tensor = torch.fft.irfft2(torch.fft.rfft2(image, s=size).mul_(response), s=size)
    return result


def zoom_crop(size: tuple[int, int], zoom: float) -> tuple[slice, slice]:
    """The central part of an image that, enlarged by `zoom`, covers it again."""
    lengths = [math.ceil(length / zoom) for length in size]
    starts = [(length - kept) // 2 for length, kept in zip(size, lengths, strict=True)]
    return slice(starts[0], starts[0] + lengths[0]), slice(starts[1], starts[1] + lengths[1])


def zoom_and_crop(planes: Tensor, zoom: float, size: tuple[int, int]) -> Tensor:
    """Enlarge float64 planes (n, c, ...) bilinearly from corner to corner and keep the central `size`.

    `planes` is the part that `zoom_crop` leaves of an image of that size.
    """
    height, width = (round(length * zoom) for length in planes.shape[2:])
    if (height, width) != tuple(planes.shape[2:]):
        planes = F.interpolate(planes, size=(height, width), mode="bilinear", align_corners=True)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    return planes[:, :, top : top + size[0], left : left + size[1]]


def motion_taps(radius: float, sigma: float, angle: float, height: int, width: int) -> list[Tap]:
    """ImageMagick's motion blur: (down, right, weight) of the pixels that are averaged, on one side of the centre only.

    Half a Gaussian along a ray at `angle` degrees, sampled at whole pixels; the weights are integers. It ends where
    the ray leaves the image, as in the `imagecorruptions` package.
    """
    count = int(2 * radius + 1)
    raw = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(count)]
    whole = _FIXED_POINT / sum(raw)
    down, right = count * math.sin(math.radians(angle)), count * math.cos(math.radians(angle))
    length = math.hypot(down, right)
    taps = []
    for i, weight in enumerate(raw):
        dy, dx = math.ceil(i * down / length - 0.5), math.ceil(i * right / length - 0.5)
        if abs(dy) >= height or abs(dx) >= width:
            break
        taps.append((dy, dx, round(weight * whole)))
    if len(taps) == count:  # flat regions must not change
        taps[0] = (0, 0, _FIXED_POINT - sum(weight for _, _, weight in taps[1:]))
    return taps


def blur_by_taps(image: Tensor, taps: list[Tap], nearest: bool = False) -> Tensor:
    """Average 8-bit planes (c, height, width) over `taps`, replicated edges; truncate to bytes or round (`nearest`)."""
    return _average(image[None], [taps], nearest)[0]


def blur_along(pixels: Tensor, angles: Tensor, radius: float, sigma: float, nearest: bool = False) -> Tensor:
    """Motion blur of images (n, c, height, width), each along its own angle in degrees."""
    height, width = pixels.shape[2:]
    # In the order of the angles: neighbors in the batch then share most of their taps.
    ascending, order = angles.sort()
    taps = [motion_taps(radius, sigma, angle, height, width) for angle in ascending.tolist()]
    return _average(pixels.index_select(0, order), taps, nearest).index_select(0, order.argsort())


def _average(pixels: Tensor, taps: list[list[Tap]], nearest: bool) -> Tensor:
    """Each image under its own taps; neighbors in the batch with the same tap are added in one call."""
    height, width = pixels.shape[2:]
    downs, rights, _ = zip(*(tap for rays in taps for tap in rays), strict=True)
    top, bottom, left, right = min(downs), max(downs), min(rights), max(rights)  # the first tap is (0, 0)
    rows = torch.arange(top, height + bottom).clamp_(0, height - 1)
    columns = torch.arange(left, width + right).clamp_(0, width - 1)
    padded = pixels.index_select(2, rows).index_select(3, columns).to(torch.int32)
    total = torch.full_like(pixels, _FIXED_POINT // 2 if nearest else 0, dtype=torch.int32)
    stride = padded.stride()
    for together in zip_longest(*taps):
        first = 0
        for tap, run in groupby(together):
            count = len(list(run))
            if tap is not None:
                # One call for the view: on small images slicing would cost more than adding.
                start = first * stride[0] + (tap[0] - top) * stride[2] + tap[1] - left
                moved = padded.as_strided((count, *pixels.shape[1:]), stride, start)
                total.narrow(0, first, count).add_(moved, alpha=tap[2])
            first += count
    return truncate_to_bytes(total.bitwise_right_shift_(_FIXED_BITS))
