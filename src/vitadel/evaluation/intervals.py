"""How sure a share of n samples is: the 95 % interval of Wilson (1927), sound for shares near 0 and 1."""

from __future__ import annotations

import math

__all__ = ["share", "wilson"]

_Z95 = 1.959963984540054


def wilson(hits: int, n: int) -> tuple[float, float]:
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
