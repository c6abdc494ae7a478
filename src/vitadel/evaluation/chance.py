"""When two numbers differ for good: exact tests of counts, with one chance in a thousand of being wrong."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["CHANCE", "beaten", "binomial_tail", "sign_test", "surprising"]

CHANCE = 1e-3
"""How often a comparison may raise an alarm by chance; a visit makes about ten of them."""


def sign_test(more: int, less: int) -> float:
    """How often at least `more` of all differing samples would fall on one side if both sides were equally likely."""
    tosses = more + less
    return float(sum(math.comb(tosses, k) for k in range(more, tosses + 1)) / 2**tosses)


def beaten(first: Tensor, second: Tensor, floor: float) -> bool:
    """Whether the second list of held samples is shorter than the first: by more than `floor` of all, and not by luck.

    Both attacks ran on the same samples, so only samples that they disagree on count.
    """
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    gap = (only_first - only_second) / max(len(first), 1)
    return gap > floor and sign_test(only_first, only_second) < CHANCE


def binomial_tail(count: int, n: int, chance: float) -> float:
    """How often at least `count` of `n` samples show what each of them shows by this chance."""
    if count <= 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    rare, common = math.log(chance), math.log1p(-chance)

    def exactly(k: int) -> float:  # by logarithms: the number of ways to choose k of many overflows
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * rare + (n - k) * common)

    return min(1.0, math.fsum(exactly(k) for k in range(count, n + 1)))


def surprising(count: int, n: int, expected: float) -> bool:
    """Whether more show something than the `expected` share of all would by luck, by the exact binomial tail."""
    return binomial_tail(count, n, expected) < CHANCE
