"""How sure a number from n samples is: Wilson's 95 % interval (1927) of a share, a bootstrap (Efron 1979) of a mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["bootstrap_mean", "share", "wilson"]

_Z95 = 1.959963984540054
_ROUNDS = 1000


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Sound for shares near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = hits / n, _Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # The exact ends at 0 and n hits are 0 and 1; float arithmetic misses them by an ulp.
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == n else centre + half)


def share(hits: int, n: int, count: str, name: str) -> dict[str, object]:
    """The fields that every accuracy carries: e.g. {"held": 31, "n": 64, "robust_accuracy": ..., "ci95": [...]}."""
    low, high = wilson(hits, n)
    return {count: hits, "n": n, name: hits / n if n else 0.0, "ci95": [low, high]}


def bootstrap_mean(values: NDArray[np.floating[Any]], seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of a mean over images: percentiles of the means of 1000 seeded redraws.

    `values` has one number per image. What an image gives in several versions is to be averaged before: versions are no
    independent samples, and stay together when drawn.
    """
    chance = np.random.default_rng(seed)
    means = [values[chance.integers(len(values), size=len(values))].mean(dtype=np.float64) for _ in range(_ROUNDS)]
    low, high = np.quantile(means, [0.025, 0.975]).tolist()
    return low, high
