"""Two-phase estimates: a cheap attack on all samples, an expensive one on a random part of those that are left.

The estimate is the share that the cheap attack leaves, minus the expensive one's part of it as seen in the sample: the
difference estimator of double sampling (Neyman 1938; Cochran 1977, chapter 12).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vitadel.sequential import corrected_wilson

Numbers = NDArray[np.float64] | NDArray[np.int64] | int

_Z95 = 1.959963984540054
_TAIL = 0.025


def two_phase_interval(n: Numbers, left: Numbers, sampled: Numbers, broken: Numbers) -> NDArray[np.float64]:
    """95 % intervals of the robust share in the population that the `n` samples were drawn from, shape (2, ...).

    `left` samples withstand the cheap attack; the expensive one broke `broken` of `sampled` of them. The two shares
    have independent errors, and each its own interval, Wilson's with continuity correction; the ends of the product's
    interval are as far from it as both errors together (Zou & Donner 2008), on a logarithmic scale.
    """
    n, left, sampled, broken = (np.asarray(each, dtype=np.float64) for each in (n, left, sampled, broken))
    size = np.maximum(sampled, 1)
    shares = np.stack([left / n, 1 - broken / size])
    lows, highs = (
        np.stack(ends)
        for ends in zip(corrected_wilson(left, n, _Z95), corrected_wilson(sampled - broken, size, _Z95), strict=True)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(shares)
        down, up = (np.sqrt(np.square(logs - np.log(ends)).sum(0)) for ends in (lows, highs))
        low, high = shares.prod(0) * np.exp(-down), shares.prod(0) * np.exp(up)
    nothing = shares.prod(0) == 0
    whole = sampled >= left  # nothing is estimated
    plain = corrected_wilson(left - broken, n, _Z95)
    low, high = np.where(nothing, 0.0, low), np.where(nothing, highs.prod(0), high)
    return np.stack([np.where(whole, plain[0], low), np.where(whole, plain[1], high).clip(max=1.0)])


def total_broken(left: int, sampled: int, broken: int, tail: float = _TAIL) -> tuple[int, int]:
    """The interval of how many of `left` samples would be broken, if `broken` of `sampled` random ones were.

    Exact, by the hypergeometric distribution: the totals that neither tail refuses, by default at 95 % together. With
    a `tail` of 5 % each end is a one-sided bound at 95 %.
    """
    least, most = broken, left - (sampled - broken)

    def below(total: int) -> bool:
        return _at_most(broken, left, total, sampled) > tail

    def above(total: int) -> bool:
        return 1 - _at_most(broken - 1, left, total, sampled) > tail

    low, high = least, most
    while low < high:  # the smallest total at which so many broken ones are not too many
        middle = (low + high) // 2
        low, high = (low, middle) if above(middle) else (middle + 1, high)
    first, low, high = low, low, most
    while low < high:  # the largest at which they are not too few
        middle = (low + high + 1) // 2
        low, high = (middle, high) if below(middle) else (low, middle - 1)
    return first, low


def _at_most(count: int, left: int, total: int, sampled: int) -> float:
    """The probability of at most `count` broken ones among the sampled, if `total` of all `left` are."""

    def choose(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    first, last = max(0, sampled - (left - total)), min(count, total, sampled)
    ways = choose(left, sampled)
    return math.fsum(
        math.exp(choose(total, k) + choose(left - total, sampled - k) - ways) for k in range(first, last + 1)
    )
