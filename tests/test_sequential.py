"""Sequential intervals: exact coverage against an enumeration of all outcomes, and what a plan costs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from vitadel.errors import UserError
from vitadel.sequential import Plan, corrected_wilson, fixed_size, make_plan, paired_evidence
from vitadel.statistics import wilson


def followed(plan: Plan, outcomes: np.ndarray) -> tuple[int, int]:
    """(hits, size) at which the plan ends on these outcomes."""
    hits, n = outcomes.cumsum(), plan.looks[0]
    while (further := plan.next_look(int(hits[n - 1]), n)) is not None:
        n = further
    return int(hits[n - 1]), n


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.77])
def test_coverage_is_that_of_all_outcomes_one_by_one(share: float) -> None:
    plan = Plan((4, 6, 9, 12), half=0.27, z=1.5)
    covered, sizes = 0.0, set()
    for outcomes in product((0, 1), repeat=12):
        hits, n = followed(plan, np.asarray(outcomes))
        low, high = plan.interval(hits, n)
        covered += (low <= share <= high) * share ** sum(outcomes) * (1 - share) ** (12 - sum(outcomes))
        sizes.add(n)
    assert len(sizes) > 1  # some stop early
    assert plan.coverage(np.asarray([share])) == pytest.approx([covered], abs=1e-7)


def test_the_endings_are_all_orders() -> None:
    plan = make_plan(5, 1_000)
    for share in (0.1, 0.5):
        total = 0.0
        for n, hits, weight in plan.endings():
            logs = np.concatenate([[0.0], np.log(np.arange(1, n + 1)).cumsum()])
            ways = logs[n] - logs[hits] - logs[n - hits]
            total += (weight * np.exp(ways + hits * np.log(share) + (n - hits) * np.log(1 - share))).sum()
        assert total == pytest.approx(1, abs=1e-5)


def test_the_interval_holds_wilsons_and_meets_the_ends() -> None:
    for hits, n in ((0, 50), (7, 50), (50, 50), (900, 1000)):
        low, high = (float(end[0]) for end in corrected_wilson(np.asarray([hits]), n, 1.959963984540054))
        inner = wilson(hits, n)
        assert low <= inner[0]
        assert inner[1] <= high
    assert corrected_wilson(np.asarray([0]), 9, 2.0)[0] == 0
    assert corrected_wilson(np.asarray([9]), 9, 2.0)[1] == 1


@pytest.mark.parametrize(("points", "available"), [(5, 10_000), (5, 300), (10, 200)])
def test_a_plan_covers_every_share(points: float, available: int) -> None:
    plan = make_plan(points, available)
    shares = np.random.default_rng(0).uniform(0.001, 0.999, 300)
    assert plan.coverage(shares).min() >= 0.95
    assert plan.coverage().min() >= 0.95
    assert plan.looks[-1] <= available


def test_peeking_with_an_ordinary_interval_would_not() -> None:
    """A plan that looks often and stops as soon as an interval of 80 % is narrow covers less than 95 %."""
    assert Plan(make_plan(5, 10_000).looks, 0.05, 1.2816).coverage().min() < 0.8


@pytest.mark.slow
def test_shares_near_the_ends_and_two_thirds_need_fewer_samples_than_a_fixed_size() -> None:
    plan, rng = make_plan(2, 10_000), np.random.default_rng(1)
    for share, most in ((0.02, 600), (0.65, fixed_size(0.02))):
        sizes = [followed(plan, rng.random(plan.looks[-1]) < share)[1] for _ in range(50)]
        assert np.mean(sizes) < most
    hits, n = followed(plan, rng.random(plan.looks[-1]) < 0.65)
    low, high = plan.interval(hits, n)
    assert (high - low) / 2 <= 0.02


@pytest.mark.parametrize("points", [0, -1, 50, float("nan")])
def test_points_that_make_no_sense_are_refused(points: float) -> None:
    with pytest.raises(UserError, match="--within takes percentage points"):
        make_plan(points, 1_000)


def test_more_precision_than_the_images_give_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"200 images cannot give an interval of 1 points either way: .*larger --within"
    ):
        make_plan(1, 200)


def test_evidence_of_pairs_is_the_mean_ratio_of_likelihoods() -> None:
    q = (np.arange(20_000) + 0.5) / 20_000
    for first, second in ((0, 0), (3, 0), (7, 2), (40, 11)):
        ratio = (2 * q) ** first * (2 * (1 - q)) ** second
        assert paired_evidence(first, second) == pytest.approx(ratio.mean(), rel=1e-5)
    assert paired_evidence(2_000, 0) > 1e100


def test_chance_seldom_reaches_decisive_evidence_however_often_one_looks() -> None:
    tosses = np.random.default_rng(0).random((2_000, 60)) < 0.5
    reached = 0
    for row in tosses:
        heads = row.cumsum()
        reached += any(paired_evidence(int(h), k + 1 - int(h)) >= 20 for k, h in enumerate(heads))
    assert 0 < reached <= 0.05 * 2_000
