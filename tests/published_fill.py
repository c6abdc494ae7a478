"""Weights and images by a formula: the same numbers filled in here and into the original public code of a model.

splitmix64 of a seed that is the SHA-256 of a tensor's name, so that no order of tensors matters. NumPy only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)
_SCALES = {  # rule -> (offset, factor on noise of variance 1)
    "norm": (1.0, 0.1),
    "bias": (0.0, 0.05),
    "gamma": (0.5, 0.1),
    "temperature": (1.0, 0.1),
    "token": (0.0, 0.2),
    "table": (0.0, 0.5),
    "running_mean": (0.0, 0.1),
    "running_var": (1.0, 0.2),
}
_COLORS = ((0.15, 0.5, 0.85), (0.8, 0.3, 0.25))


def uniform(text: str, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) that depend on the text alone."""
    seed = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], "<u8")[0]
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64)  # changed in place: memory is what takes time
        z *= _STEP
        z += seed
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
    z >>= np.uint64(11)
    return z * 2.0**-53


def fill(rule: str, key: str, shape: Sequence[int]) -> NDArray[np.float32]:
    """The tensor of this name: noise of the scale that the rule gives, or one number everywhere (`value:0.25`)."""
    if rule.startswith("value:"):
        return np.full(shape, float(rule[6:]), np.float32)
    noise = uniform(key, math.prod(shape)).reshape(shape)
    noise *= 2
    noise -= 1
    noise *= math.sqrt(3)
    if rule in ("matrix", "matrix_t"):
        noise *= math.sqrt(2 / math.prod(shape[1:] if rule == "matrix" else shape[:1]))
        return noise.astype(np.float32)
    offset, factor = _SCALES[rule]
    return (offset + factor * noise).astype(np.float32)


def images(size: int) -> NDArray[np.float32]:
    """Two images in [0, 1]: a color, waves and noise."""
    noise = uniform("image", 6 * size * size).reshape(2, 3, size, size) - 0.5
    b, c, y, x = np.indices((2, 3, size, size), dtype=np.float64)
    wave = np.sin(2 * np.pi * ((b + 1) * (c + 1) * x / size + (3 - b) * y / size))
    return (np.array(_COLORS).reshape(2, 3, 1, 1) + 0.07 * wave + 0.14 * noise).astype(np.float32)
