"""Random fields for whole images from the streams of their samples, at two numbers per 64 random bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vitadel.runtime.draws import Draws

__all__ = ["between", "normal_field", "uniform_field", "words"]


def words(draws: Draws, *shape: int) -> Tensor:
    """32 random bits per cell as signed integers, shape (samples, *shape)."""
    cells = math.prod(shape)
    return draws.bits((cells + 1) // 2).view(torch.int32)[:, :cells].reshape(len(draws), *shape)


def uniform_field(draws: Draws, *shape: int) -> Tensor:
    """Uniform on [0, 1] in float32."""
    return words(draws, *shape).to(torch.float32).mul_(2.0**-32).add_(0.5)


def between(draws: Draws, low: float, high: float) -> Tensor:
    """One number per sample, uniform between two bounds, in float64."""
    return low + (high - low) * draws.uniform(1)[:, 0].double()


def normal_field(draws: Draws, *shape: int) -> Tensor:
    """Standard normal by Box and Muller (1958): both numbers of a pair are used, unlike in `Draws.normal`."""
    cells = math.prod(shape)
    pairs = (cells + 1) // 2
    bits = words(draws, 2, pairs).to(torch.float32)
    # Half a step above zero: the logarithm stays finite, and the longest radius is 6.8.
    radius = bits[:, 0].mul(2.0**-32).add_(0.5 + 2.0**-33).clamp_(min=2.0**-33).log_().mul_(-2).sqrt_()
    angle = bits[:, 1].mul_(2 * math.pi * 2.0**-32)
    field = torch.stack((torch.cos(angle).mul_(radius), torch.sin(angle).mul_(radius)), dim=1)
    return field.view(len(draws), 2 * pairs)[:, :cells].reshape(len(draws), *shape)
