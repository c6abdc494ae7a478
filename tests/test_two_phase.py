"""Two-phase estimates: exact where they can be, coverage by simulation, and what they save."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitadel.attacks.parse import make
from vitadel.two_phase import total_broken, two_phase_interval


@pytest.mark.parametrize("n", [500, 5000])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("broken", [0.002, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("sampled", [50, 200, 800])
def test_intervals_cover_the_share_in_95_percent_of_simulated_audits(n, share, broken, sampled):
    """20,000 audits each: the images, what the cheap attack leaves, and the part that the expensive one gets."""
    rng, rounds = np.random.default_rng(1), 20_000
    left = rng.binomial(n, share, rounds)
    fragile = rng.binomial(left, broken)
    size = np.minimum(sampled, left)
    seen = rng.hypergeometric(fragile, left - fragile, size)
    low, high = two_phase_interval(np.full(rounds, n), left, size, seen)
    truth = share * (1 - broken)
    error = 4 * math.sqrt(0.95 * 0.05 / rounds)
    assert ((low <= truth) & (truth <= high)).mean() >= 0.95 - error


@pytest.mark.parametrize(("left", "total", "sampled"), [(400, 12, 60), (400, 0, 60), (50, 25, 20), (1000, 30, 400)])
def test_totals_are_covered_exactly(left, total, sampled):
    """Over all outcomes with their hypergeometric probabilities, not by simulation."""
    ways = math.comb(left, sampled)
    covered = 0.0
    for seen in range(max(0, sampled - (left - total)), min(sampled, total) + 1):
        low, high = total_broken(left, sampled, seen)
        assert seen <= low <= high <= left - (sampled - seen)
        covered += (low <= total <= high) * math.comb(total, seen) * math.comb(left - total, sampled - seen) / ways
    assert covered >= 0.95


def test_a_sample_of_all_is_no_estimate():
    assert total_broken(40, 40, 7) == (7, 7)
    low, high = two_phase_interval(100, 40, 40, 7)
    assert low < 0.33 < high


def test_equal_width_costs_at_most_a_quarter():
    """AutoAttack after 20 steps of APGD-CE: 60 % are left by these, of which AutoAttack breaks 5 %.

    A gradient counts two passes. Of the full audit only the images that AutoAttack does not break are counted.
    """
    cheap, expensive = (2 * g + f for g, f in (make(name).passes() for name in ("apgd-ce(steps=20)", "autoattack")))
    n, sampled, share, broken = 10_000, 400, 0.6, 0.05
    low, high = two_phase_interval(n, round(share * n), sampled, round(broken * sampled))
    robust = share * (1 - broken)
    full = robust * (1 - robust) * (2 * 1.96 / (high - low)) ** 2  # images of an audit with that width
    assert n * cheap + sampled * expensive <= full * robust * expensive / 4


def test_nothing_left_and_everything_broken_end_at_zero():
    assert two_phase_interval(100, 0, 0, 0)[0] == 0
    low, high = two_phase_interval(100, 50, 10, 10)
    assert low == 0
    assert 0 < high < 0.3


@pytest.mark.parametrize(("left", "total", "sampled"), [(400, 12, 40), (400, 3, 40), (50, 25, 5), (3000, 90, 300)])
def test_each_end_is_a_one_sided_bound(left, total, sampled):
    ways = math.comb(left, sampled)
    covered = 0.0
    for seen in range(max(0, sampled - (left - total)), min(sampled, total) + 1):
        high = total_broken(left, sampled, seen, tail=0.05)[1]
        covered += (total <= high) * math.comb(total, seen) * math.comb(left - total, sampled - seen) / ways
    assert covered >= 0.95
    least = total_broken(left, sampled, 0, tail=0.05)[1]  # without any broken one: as many as may all be overlooked
    assert math.comb(left - least, sampled) / ways > 0.05 >= math.comb(left - least - 1, sampled) / ways


def test_without_a_sample_everything_may_be_broken():
    assert total_broken(30, 0, 0, tail=0.05) == (0, 30)
