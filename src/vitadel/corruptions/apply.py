"""Apply a corruption by name: check the images and process them as 8-bit chunks that fit the CPU cache."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitadel.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from vitadel.corruptions.constants import TABLES, Table, table_for
from vitadel.corruptions.digital import contrast, elastic_transform, jpeg_compression, pixelate, saturate
from vitadel.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from vitadel.corruptions.spatter import spatter
from vitadel.corruptions.weather import brightness, fog, frost, snow
from vitadel.errors import UserError, check_known
from vitadel.runtime.rng import SampleRNG

_PIXELS_AT_ONCE = 1 << 16  # one image of 224 pixels, or 64 of 32
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        *(gaussian_noise, shot_noise, impulse_noise, defocus_blur, glass_blur, motion_blur, zoom_blur),
        *(snow, frost, fog, brightness, contrast, elastic_transform, pixelate, jpeg_compression),
        *(speckle_noise, gaussian_blur, spatter, saturate),
    )
}
_DETERMINISTIC = {
    *("defocus_blur", "gaussian_blur", "zoom_blur"),
    *("brightness", "contrast", "saturate", "pixelate", "jpeg_compression"),
}
_CHANNELS_LAST = "jpeg_compression"  # its codec takes interleaved colors
_MINIMUM = {"glass_blur": 4, "elastic_transform": 3, "spatter": 3, "pixelate": 2, "fog": 2}


def corrupt(
    x: Tensor, name: str, severity: int, rng: SampleRNG | None = None, constants: Table | int | None = None
) -> Tensor:
    """Corrupt copies of images (n, 3, height, width) with values in [0, 1]; results are whole levels k / 255.

    Images are rounded to 8 bits, as in the benchmark, and need not be square. Every sample has its own random stream
    for each corruption and severity: give `rng` made from the indices of the data set, or the images themselves are the
    key. `constants` is a table or the size of one (224, 64, 32); by default the one nearest to the shorter side. The
    work is done on the CPU.
    """
    check_images(x)
    table = _table(constants) if constants is not None else table_for(x.shape[2], x.shape[3])
    row = table.row(name, severity)
    if min(x.shape[2:]) < minimum_size(name):
        raise UserError(
            f"'{name}' needs images of at least {minimum_size(name)} pixels on both sides, got {x.shape[2]} x "
            f"{x.shape[3]}: enlarge them or remove this corruption"
        )
    rng = _streams(x, rng, name, severity)
    count = max(1, _PIXELS_AT_ONCE // (x.shape[2] * x.shape[3]))
    result = torch.empty(x.shape, dtype=x.dtype)
    # Conversions to 8 bits and back are done per chunk as well, while its data is in the cache.
    for first in range(0, len(x), count):
        part = slice(first, first + count)
        pixels = _FUNCTIONS[name](
            as_bytes(x[part], channels_last=name == _CHANNELS_LAST), SampleRNG(rng.keys[part]), *row
        )
        _write_floats(pixels, result[part])
    return result.to(x.device)


def minimum_size(name: str) -> int:
    """The minimum length of the shorter side for this corruption."""
    check_known("corruption", name, _FUNCTIONS)
    return _MINIMUM.get(name, 1)


def check_images(x: Tensor) -> None:
    """Check shape and type of a batch of RGB images; `as_bytes` checks that values are in [0, 1]."""
    if x.ndim != 4 or x.shape[1] != 3 or 0 in x.shape[2:]:
        raise UserError(f"corruptions take RGB images of shape (n, 3, height, width), got {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"corruptions take float32 or float64 pixels in [0, 1], got {x.dtype}: convert with x.float() / 255"
        )


def sample_streams(x: Tensor, rng: SampleRNG | None) -> SampleRNG:
    """One random stream per image, on the CPU; without `rng` the images are their own keys."""
    if rng is None:
        return SampleRNG.of_pixels(x.detach().cpu())
    if len(rng) != len(x):
        raise UserError(f"rng for {len(rng)} samples was given for {len(x)} images: give one stream per image")
    return SampleRNG(rng.keys.cpu())


def _streams(x: Tensor, rng: SampleRNG | None, name: str, severity: int) -> SampleRNG:
    if name in _DETERMINISTIC and rng is None:
        return SampleRNG(torch.zeros(len(x), dtype=torch.int64))
    rng = sample_streams(x, rng)
    return rng if name in _DETERMINISTIC else rng.stream(name, severity)


def as_bytes(x: Tensor, channels_last: bool = False) -> Tensor:
    """Round to 256 levels, (n, channels, height, width); `channels_last` is the order in memory.

    With NumPy, one channel after the other: the data and scratch memory stay in the inner cache, and interleaving is
    faster.
    """
    values = x.detach().cpu().numpy()
    n, channels, height, width = values.shape
    pixels = np.empty((n, height, width, channels) if channels_last else values.shape, np.uint8)
    if channels_last:
        pixels = pixels.transpose(0, 3, 1, 2)
    scratch = np.empty((n, height, width), values.dtype)
    for channel in range(channels) if n else ():
        plane = values[:, channel]
        if not (float(plane.min()) >= -1e-6 and float(plane.max()) <= 1 + 1e-6):
            low, high = values.min(), values.max()
            raise UserError(
                f"corruptions take pixels in [0, 1], got {low:.4g} to {high:.4g}: divide 8-bit pixels by 255"
            )
        np.multiply(plane, 255, out=scratch)
        np.copyto(pixels[:, channel], np.rint(scratch, out=scratch), casting="unsafe")
    return torch.from_numpy(pixels)


def _write_floats(pixels: Tensor, result: Tensor) -> None:
    """Write levels / 255 into `result`, divided in float32 for any type of the result, as torch does."""
    levels, values = pixels.numpy(), result.numpy()
    scratch = np.empty((len(levels), *levels.shape[2:]), np.float32)
    for channel in range(levels.shape[1]):
        np.copyto(scratch, levels[:, channel])
        np.divide(scratch, np.float32(255), out=values[:, channel])


def as_floats(pixels: Tensor, like: Tensor) -> Tensor:
    return pixels.to(like.dtype).div_(255).to(like.device)


def _table(constants: Table | int) -> Table:
    if isinstance(constants, Table):
        return constants
    if constants not in TABLES:
        raise UserError(
            f"there are tables of constants for {', '.join(map(str, TABLES))} pixels, not for {constants!r}"
        )
    return TABLES[constants]
