"""Intervals of shares and means, and exact tests of counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALPHA = 1e-3
"""Significance level of a single comparison; a diagnosis makes about ten of them."""

_Z95 = 1.959963984540054
_ROUNDS = 1_000
_PAIR_ROUNDS = 5_000
_FLIPS = 9_999
_AT_ONCE = 2**16  # numbers of resamples in memory


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share (1927), sound also for shares near 0 and 1."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = hits / n, _Z95**2
    center = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # The exact ends at 0 and n hits are 0 and 1; float arithmetic misses them by an ulp.
    return (0.0 if hits == 0 else center - half), (1.0 if hits == n else center + half)


def share(hits: int, n: int, count: str, name: str) -> dict[str, object]:
    """The fields that every accuracy has: e.g. {"held": 31, "n": 64, "robust_accuracy": ..., "ci95": [...]}."""
    low, high = wilson(hits, n)
    return {count: hits, "n": n, name: hits / n if n else 0.0, "ci95": [low, high]}


def chance_level(labels: Sequence[int], outputs: int) -> float:
    """The accuracy of a guess among the classes that occur: that of the most frequent one; 1/outputs for one class."""
    counts = Counter(labels)
    return 1 / max(outputs, 2) if len(counts) == 1 else max(counts.values()) / len(labels)


def bootstrap_mean(
    values: NDArray[np.floating[Any]], seed: int = 0, level: float = 0.95, rounds: int = _ROUNDS
) -> tuple[float, float]:
    """The interval of a mean over images: percentiles of the means of seeded resamples (Efron 1979).

    `values` has one number per image. Average over versions of an image first: they are not independent samples.
    """
    means = [values[rows].mean(axis=1, dtype=np.float64) for rows in _resamples(len(values), rounds, seed)]
    tail = (1 - level) / 2 if level != 0.95 else 0.025  # as a literal, the usual level has no rounding error
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail]).tolist()
    return low, high


def _resamples(n: int, rounds: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Rows of `n` places drawn with replacement, `rounds` in all; how many come at once changes none of them."""
    rng = np.random.default_rng(seed)
    return (rng.integers(n, size=(rows, n)) for rows in _parts(n, rounds))


def _parts(n: int, rounds: int) -> Iterator[int]:
    """How many rounds over `n` samples are in memory at once, until all are done."""
    at_once = max(1, _AT_ONCE // max(n, 1))
    return (min(at_once, rounds - first) for first in range(0, rounds, at_once))


def student_quantile(p: float, freedom: int) -> float:
    """The quantile of Student's t distribution, for p above 1/2, by bisection of its distribution function."""
    low, high = 0.0, 1.0
    while _student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, freedom) < p else (low, middle)
    return high


def _student_cdf(t: float, freedom: int) -> float:
    """P(T < t) for t at least 0: the finite sums for whole degrees of freedom (Abramowitz & Stegun, 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 + inside) / 2


def bootstrap_ratio(
    values: NDArray[np.floating[Any]], others: NDArray[np.floating[Any]], seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of a ratio of means over the same images: percentiles of 1000 seeded paired resamples."""
    ratios = [
        values[rows].mean(axis=1, dtype=np.float64) / others[rows].mean(axis=1, dtype=np.float64)
        for rows in _resamples(len(values), _ROUNDS, seed)
    ]
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975]).tolist()
    return low, high


def sign_test(more: int, less: int) -> float:
    """P-value of the one-sided sign test: at least `more` of `more + less` differences on one side by chance."""
    tosses = more + less
    term = tail = math.comb(tosses, less)
    for hits in range(less, 0, -1):  # C(n, k-1) from C(n, k): exact in integers, and quick for many samples
        term = term * hits // (tosses - hits + 1)
        tail += term
    return tail / (1 << tosses)


def mcnemar(only_first: int, only_second: int) -> float:
    """P-value of the two-sided exact test of McNemar (1947) from the two counts of discordant samples."""
    fewer, more = sorted((only_first, only_second))
    return min(1.0, 2 * sign_test(more, fewer))


def sign_flip_test(differences: NDArray[np.floating[Any]], seed: int = 0) -> float:
    """P-value of the two-sided paired permutation test of a mean of 0 (Fisher 1935), from 9,999 seeded random flips.

    If both sides are equally good, every difference is as likely with the other sign.
    """
    rng = np.random.default_rng(seed)
    values = np.asarray(differences, dtype=np.float64)
    reached = abs(values.sum()) * (1 - 1e-12)  # sums in another order may differ in their last digits
    flips = (rng.choice((-1.0, 1.0), size=(rows, len(values))) for rows in _parts(len(values), _FLIPS))
    return (1 + sum(int((abs(signs @ values) >= reached).sum()) for signs in flips)) / (_FLIPS + 1)


def difference_interval(only_first: int, only_second: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two paired shares, by a seeded bootstrap over images.

    One discordant image of either kind is added before resampling: otherwise two models that never differed would get
    an interval of width zero.
    """
    if n == 0:
        return -1.0, 1.0
    total = n + 2
    shares = ((only_first + 1) / total, (only_second + 1) / total, (n - only_first - only_second) / total)
    drawn = np.random.default_rng(0).multinomial(total, shares, size=_PAIR_ROUNDS)
    low, high = np.quantile((drawn[:, 0] - drawn[:, 1]) / total, (0.025, 0.975))
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for multiple comparisons (Holm 1979)."""
    adjusted = [0.0] * len(p_values)
    least = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def binomial_tail(count: int, n: int, p: float) -> float:
    """The probability of at least `count` successes in `n` trials with success probability `p`."""
    if count <= 0 or p >= 1:
        return 1.0
    if p <= 0:
        return 0.0
    success, failure = math.log(p), math.log1p(-p)

    def exactly(k: int) -> float:  # by logarithms: binomial coefficients of many samples overflow
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * success + (n - k) * failure)

    return min(1.0, math.fsum(exactly(k) for k in range(count, n + 1)))


def exceeds_share(count: int, n: int, expected: float) -> bool:
    """Whether `count` of `n` is significantly more than the `expected` share, by the exact binomial test."""
    return binomial_tail(count, n, expected) < ALPHA


def significantly_fewer(first: Any, second: Any, floor: float) -> bool:
    """Whether the second mask of robust samples has fewer than the first: by more than `floor` of all, significantly.

    Both are boolean tensors or arrays over the same samples, so only samples on which they disagree count.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    gap = (only_first - only_second) / max(len(first), 1)
    return gap > floor and sign_test(only_first, only_second) < ALPHA
