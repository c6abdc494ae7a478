"""Random numbers that belong to a sample: SplitMix64 (Steele, Lea & Flood 2014) as a counter-based generator.

A draw is a pure function of (seed, sample, stream, position). It therefore does not depend on batch size, on the
other samples of the batch, on the number of processes, or on what was drawn before, and it never touches torch's
global generator. Everything is vectorized over the batch: no Python loop over samples.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as torch's signed integer."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 64-bit patterns as torch's signed integers
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_MOST_AT_ONCE = 1 << 20  # cells: bounds the int64 scratch memory of one draw to a few times 8 MB
_IN_CACHE = 1 << 16  # cells that one CPU thread mixes without going to memory: three times as fast


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch's own is arithmetic and would smear the sign bit."""
    shifted = bits >> count
    shifted &= (1 << (64 - count)) - 1
    return shifted


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finalizer: a bijection of 64-bit words; integer products wrap around."""
    return _mixed_in_place(bits.clone())


def _mixed_in_place(bits: Tensor) -> Tensor:
    bits ^= _shift_right(bits, 30)
    bits *= _MIX_1
    bits ^= _shift_right(bits, 27)
    bits *= _MIX_2
    bits ^= _shift_right(bits, 31)
    return bits


def _rows_at_once(cells: int, device: torch.device) -> int:
    most = _MOST_AT_ONCE if device.type != "cpu" else min(_MOST_AT_ONCE, _IN_CACHE * torch.get_num_threads())
    return max(1, most // max(cells, 1))


@dataclass(frozen=True)
class SampleRNG:
    """One independent random stream per sample of a batch.

    `keys` holds one 64-bit state per sample. `stream(name, ...)` derives an independent child, so two places that
    draw from differently named streams never share numbers; the same name gives the same numbers again.
    """

    keys: Tensor

    @classmethod
    def of_samples(cls, seed: int, samples: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> SampleRNG:
        """Keyed by the stable indices that a data set gives its samples."""
        index = torch.as_tensor(samples, dtype=torch.int64, device=device)
        start = _mix(torch.tensor([_signed(seed)], dtype=torch.int64, device=device) + _GOLDEN)
        return cls(_mix(start + _mix(index * _GOLDEN + _MIX_1)))

    @classmethod
    def of_pixels(cls, x: Tensor, seed: int = 0) -> SampleRNG:
        """Keyed by the images themselves, for callers without sample indices: still blind to the rest of the batch."""
        words = x.detach().to(torch.float32).contiguous().view(torch.int32).to(torch.int64).flatten(1)
        places = torch.arange(words.shape[1], device=x.device, dtype=torch.int64) * _GOLDEN
        digest = _mix(words * _MIX_2 + places).sum(1)
        start = _mix(torch.tensor([_signed(seed)], dtype=torch.int64, device=x.device) + _GOLDEN)
        return cls(_mix(start + _mix(digest)))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, chosen: Tensor) -> SampleRNG:
        """The draws of the chosen samples (a mask or positions)."""
        return replace(self, keys=self.keys[chosen])

    def stream(self, name: str, *numbers: int) -> SampleRNG:
        """An independent stream, e.g. `draws.stream("restart", 3)`."""
        keys = self.keys
        for word in (zlib.crc32(name.encode()), *numbers):
            keys = _mix(keys ^ _mix(torch.full_like(keys, _signed(word * 2 + 1)) * _GOLDEN))
        return replace(self, keys=keys)

    def bits(self, *shape: int) -> Tensor:
        """64 random bits per cell, shape (samples, *shape)."""
        cells = math.prod(shape)
        counter = (torch.arange(1, cells + 1, device=self.keys.device, dtype=torch.int64)) * _GOLDEN
        keys = self.keys.split(_rows_at_once(cells, self.keys.device))
        parts = [_mixed_in_place(part[:, None] + counter) for part in keys] or [counter.new_empty(0, cells)]
        return torch.cat(parts).view(len(self), *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform on [0, 1) in float32: 24 bits, so the value is exact on every device."""
        cells = math.prod(shape)
        rows = _rows_at_once(cells, self.keys.device)
        out = torch.empty(len(self), *shape, device=self.keys.device)
        for first in range(0, len(self), rows):
            part = replace(self, keys=self.keys[first : first + rows]).bits(*shape)
            out[first : first + rows] = _shift_right(part, 40).to(torch.float32) * 2.0**-24
        return out

    def normal(self, *shape: int) -> Tensor:
        """Standard normal by Box and Muller (1958), computed in float64."""
        radius = self.stream("radius").uniform(*shape).double()
        angle = self.stream("angle").uniform(*shape).double()
        return (torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos(2 * math.pi * angle)).float()

    def signs(self, *shape: int) -> Tensor:
        """+1 or -1 with equal chance."""
        return torch.where(self.bits(*shape) < 0, -1.0, 1.0)

    def integers(self, below: int, *shape: int) -> Tensor:
        """Integers in [0, below); the bias of the multiplication is below 2**-31 * below."""
        return (_shift_right(self.bits(*shape), 33) * below) >> 31

    def permutation(self, count: int) -> Tensor:
        """A random permutation of range(count) per sample, shape (samples, count)."""
        return self.bits(count).argsort(dim=1)
