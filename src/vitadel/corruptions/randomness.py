"""Random fields for whole images from per-sample streams, with two numbers per 64 random bits."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from vitadel.runtime.rng import SampleRNG

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIXING = (  # SplitMix64's finalizer, as in `SampleRNG`: shift, then factor
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), None),
)


def words(rng: SampleRNG, *shape: int) -> Tensor:
    """32 random bits per cell as signed integers, shape (samples, *shape)."""
    cells = math.prod(shape)
    return _bits(rng, (cells + 1) // 2).view(torch.int32)[:, :cells].reshape(len(rng), *shape)


def _bits(rng: SampleRNG, cells: int) -> Tensor:
    """`rng.bits(cells)` at half its cost, which matters for whole images."""
    counter = np.arange(1, cells + 1, dtype=np.uint64) * _GOLDEN
    bits = rng.keys.numpy().view(np.uint64)[:, None] + counter
    shifted = np.empty_like(bits)
    for shift, factor in _MIXING:
        np.right_shift(bits, shift, out=shifted)
        np.bitwise_xor(bits, shifted, out=bits)
        if factor is not None:
            np.multiply(bits, factor, out=bits)
    return torch.from_numpy(bits.view(np.int64))


def uniform_field(rng: SampleRNG, *shape: int) -> Tensor:
    """Uniform on [0, 1] in float32."""
    return words(rng, *shape).to(torch.float32).mul_(2.0**-32).add_(0.5)


def between(rng: SampleRNG, low: float, high: float) -> Tensor:
    """One number per sample, uniform between two bounds, in float64."""
    return low + (high - low) * rng.uniform(1)[:, 0].double()


def normal_field(rng: SampleRNG, *shape: int) -> Tensor:
    """Standard normal by Box and Muller (1958): both numbers of a pair are used, unlike in `SampleRNG.normal`."""
    cells = math.prod(shape)
    pairs = (cells + 1) // 2
    bits = words(rng, 2, pairs).to(torch.float32)
    # Half a step above zero: the logarithm is finite, and the largest radius is 6.8.
    radius = bits[:, 0].mul_(2.0**-32).add_(0.5 + 2.0**-33).clamp_(min=2.0**-33).log_().mul_(-2).sqrt_()
    angle = bits[:, 1].mul_(2 * math.pi * 2.0**-32)
    cosine = torch.cos(angle)
    # In place: both are views of `bits`, which becomes the field.
    angle.sin_().mul_(radius)
    radius.mul_(cosine)
    return bits.view(len(rng), 2 * pairs)[:, :cells].reshape(len(rng), *shape)
