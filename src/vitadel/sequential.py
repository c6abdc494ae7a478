"""As many samples as an answer needs: looks at a growing sample, and intervals that stay valid although it may stop.

The sample grows until the interval of the share is narrow enough: a fixed-width interval (Chow & Robbins 1965), looked
at by a group-sequential plan (Jennison & Turnbull 2000). Stopping by what one sees makes an ordinary interval too
narrow. Here it is Wilson's interval with continuity correction (Newcombe 1998), with a critical value so large that its
coverage, computed over all ways in which the looks can go, is at least 95 % for every share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitadel.errors import UserError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_COVERAGE = 0.95
_GROWTH = 1.05  # of the sample between looks
_AIM = 0.9  # of the size that the present share needs: the share may turn out cheaper
_FIRST = 100
_CRITICAL = (1.95, 2.3)  # the search for the critical value
_RESOLUTION = 0.01  # of the critical value
_SHARES = 400  # at which the coverage is computed
_NEGLIGIBLE = 1e-9  # share of orders
_DEVIATIONS = 6.5  # beyond which a number of hits is as unlikely as that


def corrected_wilson(hits: Floats | Counts, n: Floats | Counts | int, z: float) -> tuple[Floats, Floats]:
    """Wilson's interval with continuity correction, whose ends are 0 and 1 where there are 0 or n hits."""
    size = np.asarray(n, dtype=np.float64)
    p, z2 = hits / size, z * z
    inside = [4 * p * (size * (1 - p) + sign) for sign in (1, -1)]
    low = (2 * size * p + z2 - 1 - z * np.sqrt(np.maximum(z2 - 2 - 1 / size + inside[0], 0))) / (2 * (size + z2))
    high = (2 * size * p + z2 + 1 + z * np.sqrt(np.maximum(z2 + 2 - 1 / size + inside[1], 0))) / (2 * (size + z2))
    return np.where(hits == 0, 0.0, np.maximum(low, 0)), np.where(hits == size, 1.0, np.minimum(high, 1))


@dataclass(frozen=True)
class Plan:
    """When to look, and how wide the interval may be: `half` either way, by the critical value `z`."""

    looks: tuple[int, ...]
    half: float
    z: float

    def interval(self, hits: int, n: int) -> tuple[float, float]:
        low, high = corrected_wilson(np.asarray([hits]), n, self.z)
        return float(low[0]), float(high[0])

    def next_look(self, hits: int, n: int) -> int | None:
        """The size of the next sample; None if this one is enough, or the last."""
        place = self.looks.index(n)
        following = int(self._following[place][hits])
        return None if following < 0 else self.looks[following]

    @cached_property
    def _following(self) -> list[Counts]:
        """For each look and number of hits, the place of the next look; -1 if the sample is enough."""
        return [self._places(place) for place in range(len(self.looks))]

    def _places(self, place: int) -> Counts:
        n, last = self.looks[place], len(self.looks) - 1
        hits = np.arange(n + 1)
        if place == last:
            return np.full(n + 1, -1)
        enough = self._is_narrow(hits / n, np.full(n + 1, n))
        needed = self._needed(hits / n)
        chosen = np.searchsorted(np.asarray(self.looks), _AIM * needed).clip(place + 1, last)
        return np.where(enough, -1, chosen)

    def _is_narrow(self, share: Floats, n: Floats | Counts) -> NDArray[np.bool_]:
        low, high = corrected_wilson((share * n).astype(np.float64), n, self.z)
        return (high - low) / 2 <= self.half

    def _needed(self, share: Floats) -> Floats:
        """The size at which the interval of each share is narrow enough, by bisection."""
        low, high = np.ones(len(share)), np.full(len(share), 10 * self.looks[-1] + 100.0)
        for _ in range(30):
            middle = (low + high) / 2
            narrow = self._is_narrow(share, middle)
            low, high = np.where(narrow, low, middle), np.where(narrow, middle, high)
        return high

    def endings(self) -> Iterator[tuple[int, Counts, Floats]]:
        """For each look: its size, the numbers of hits at which it ends there, and the share of orders that do.

        With `hits` among `n` samples, each order of them is as likely as any other, whatever the true share is. So
        how many of the orders come to a look without having ended earlier is counted once, for all shares.
        """
        orders = [np.zeros(n + 1) for n in self.looks]
        orders[0][:] = 1.0
        factorials = np.concatenate([[0.0], np.log(np.arange(1, self.looks[-1] + 1)).cumsum()])
        for place, n in enumerate(self.looks):
            following = self._following[place]
            reached = orders[place] > _NEGLIGIBLE
            ends = np.flatnonzero((following < 0) & reached)
            yield n, ends, orders[place][ends]
            for target in np.unique(following[(following >= 0) & reached]):
                hits = np.flatnonzero((following == target) & reached)[:, None]
                more = self.looks[target] - n
                reach = math.ceil(_DEVIATIONS * math.sqrt(more * (1 + more / n)) / 2)
                around = np.arange(-min(reach, more), min(reach, more) + 1)
                fresh = np.rint(more * hits / n).astype(np.int64) + around
                hits, fresh = np.broadcast_arrays(hits, fresh)
                possible = (fresh >= 0) & (fresh <= more)
                hits, fresh = hits[possible], fresh[possible]
                chances = np.exp(
                    _log_choose(factorials, n, hits)
                    + _log_choose(factorials, more, fresh)
                    - _log_choose(factorials, n + more, hits + fresh)
                )
                weights = orders[place][hits] * chances
                orders[target] += np.bincount(hits + fresh, weights, minlength=len(orders[target]))

    def coverage(self, shares: Floats | None = None) -> Floats:
        """The probability that the last interval contains the share, for each share; by default for difficult ones."""
        endings = [(n, hits, weight, *corrected_wilson(hits, n, self.z)) for n, hits, weight in self.endings()]
        if shares is None:
            ends = np.concatenate([np.concatenate([low, high]) for *_, low, high in endings])
            ends = np.unique(ends[(ends > 0) & (ends < 1)])
            beyond = np.concatenate([ends - 1e-9, ends + 1e-9])  # coverage jumps there
            shares = np.sort(beyond)[:: max(1, len(beyond) // _SHARES)]
        factorials = np.concatenate([[0.0], np.log(np.arange(1, self.looks[-1] + 1)).cumsum()])
        covered = np.zeros(len(shares))
        for n, hits, weight, low, high in endings:
            if len(hits):
                logs = _log_choose(factorials, n, hits) + np.log(np.maximum(weight, 1e-300))
                powers = hits * np.log(shares)[:, None] + (n - hits) * np.log1p(-shares)[:, None]
                inside = (low <= shares[:, None]) & (shares[:, None] <= high)
                covered += (np.exp(logs + powers) * inside).sum(1)
        return covered


def _log_choose(factorials: Floats, n: int, k: Counts) -> Floats:
    chosen: Floats = factorials[n] - factorials[k] - factorials[n - k]
    return chosen


def paired_evidence(only_first: int, only_second: int) -> float:
    """Evidence against equally many discordant samples of both kinds: a ratio of likelihoods, uniform over the others.

    It is a test martingale (Robbins 1970): if both kinds are equally likely, it ever reaches 20 in at most 5 % of the
    cases, however often one looks.
    """
    total = only_first + only_second
    log = total * math.log(2) + math.lgamma(only_first + 1) + math.lgamma(only_second + 1) - math.lgamma(total + 2)
    return math.exp(min(log, 700.0))


def fixed_size(half: float) -> int:
    """The sample of a fixed size whose Wilson interval is at most `half` either way, whatever the share is."""
    return math.ceil(1.959963984540054**2 * (1 / (4 * half * half) - 1))


def make_plan(points: float, available: int) -> Plan:
    """The plan for an interval of at most so many percentage points either way, from at most `available` samples."""
    half = points / 100
    if not 0 < half < 0.5:
        raise UserError(f"--within takes percentage points, more than 0 and less than 50; got {points:g}. Try 2.")
    needed = _CRITICAL[1] ** 2 / 4 / half / half  # may be infinite
    at_most = available if needed >= available else math.ceil(needed) + 10
    looks, size = [min(_FIRST, available)], float(_FIRST)
    while looks[-1] < min(available, at_most):
        size *= _GROWTH
        looks.append(min(math.ceil(size), available, at_most))
    draft = Plan(tuple(looks), half, _CRITICAL[0])
    low, high = corrected_wilson(np.asarray([0]), available, draft.z)
    if (best := float(high[0] - low[0]) / 2) > half:
        low, high = corrected_wilson(np.asarray([available // 2]), available, draft.z)
        raise UserError(
            f"{available:,} images cannot give an interval of {points:g} points either way: it is {100 * best:.2g} "
            f"points if all or none are robust, and {50 * float(high[0] - low[0]):.2g} points for a share of a half. "
            "Give more images, or a larger --within."
        )
    return _calibrated(draft)


def _calibrated(draft: Plan) -> Plan:
    """The same plan with the smallest critical value that gives the coverage."""
    low, high = _CRITICAL
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        enough = replace(draft, z=middle).coverage().min() >= _COVERAGE
        low, high = (low, middle) if enough else (middle, high)
    return replace(draft, z=high)
