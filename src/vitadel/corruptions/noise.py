"""Noise: Gaussian, shot, impulse and speckle, on 8-bit images (n, 3, height, width)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vitadel.corruptions.filtering import to_bytes
from vitadel.corruptions.randomness import normal_field, uniform_field, words
from vitadel.runtime.rng import SampleRNG

_GUIDES = 256
_WALKS = 3


def gaussian_noise(pixels: Tensor, rng: SampleRNG, sigma: float) -> Tensor:
    """x + N(0, sigma)."""
    return to_bytes(normal_field(rng, *pixels.shape[1:]).mul_(255 * sigma).add_(pixels))


def speckle_noise(pixels: Tensor, rng: SampleRNG, sigma: float) -> Tensor:
    """x + x N(0, sigma)."""
    return to_bytes(normal_field(rng, *pixels.shape[1:]).mul_(sigma).add_(1).mul_(pixels))


def impulse_noise(pixels: Tensor, rng: SampleRNG, amount: float) -> Tensor:
    """Salt and pepper in each channel: a fraction `amount` of all values, half to each end."""
    bits = words(rng, *pixels.shape[1:])
    tail = round(amount / 2 * 2**32)
    return pixels.masked_fill(bits < tail - 2**31, 0).masked_fill_(bits > 2**31 - 1 - tail, 255)


def shot_noise(pixels: Tensor, rng: SampleRNG, photons: float) -> Tensor:
    """Poisson(x photons) / photons, by inversion with tables of the 256 possible rates."""
    table = _poisson(photons)
    chance = uniform_field(rng, *pixels.shape[1:]).flatten().clamp_(max=1 - 2.0**-24)
    rate = pixels.flatten().to(torch.int64)
    place = table.starts.take((chance * _GUIDES).to(torch.int64).add_(rate, alpha=_GUIDES))
    left = (table.steps.take(place) <= chance).nonzero()[:, 0]
    for _ in range(_WALKS):
        place[left] += 1
        left = left[table.steps.take(place[left]) <= chance[left]]
    # Only the tails of the distributions remain.
    place[left] = torch.searchsorted(table.ordered, rate[left] + chance[left].double(), right=True)
    return table.levels.take(place).view_as(pixels)


@dataclass(frozen=True)
class _Poisson:
    """Concatenated distribution functions of 256 rates, with indices to search them.

    `starts`: first position, by rate and first bits of the chance; `ordered`: rate plus chance, ascending; `levels`:
    the gray level of each count.
    """

    steps: Tensor
    starts: Tensor
    ordered: Tensor
    levels: Tensor


@lru_cache(maxsize=16)
def _poisson(photons: float) -> _Poisson:
    rates = np.arange(256) / 255 * photons
    counts = np.arange(int(photons + 10 * np.sqrt(photons) + 20))
    logs = np.concatenate(([0.0], np.cumsum(np.log(counts[1:]))))
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(counts * np.log(rates)[:, None] - rates[:, None] - logs)
    weights[0] = counts == 0
    steps = np.minimum(np.cumsum(weights, axis=1), 1).astype(np.float32)
    steps[:, -1] = 1  # above every chance, to end the search
    guides = np.arange(_GUIDES) / _GUIDES
    starts = [np.searchsorted(row, guides, side="right") + rate * len(counts) for rate, row in enumerate(steps)]
    ordered = np.arange(256)[:, None] + steps.astype(np.float64)
    levels = np.tile(np.uint8(np.clip(counts / photons, 0, 1) * 255), 256)
    tables = (steps, np.stack(starts), ordered, levels)
    return _Poisson(*(torch.from_numpy(table).flatten() for table in tables))
