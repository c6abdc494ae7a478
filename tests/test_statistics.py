"""Wilson's interval, against numbers computed elsewhere, and the bootstrap, against the normal approximation."""

from __future__ import annotations

import numpy as np
import pytest

from vitadel import statistics
from vitadel.statistics import bootstrap_mean, share, sign_flip_test, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Newcombe (1998), Statistics in Medicine 17, table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_known_intervals(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


def test_ends_are_exact():
    assert wilson(0, 50)[0] == 0.0
    assert wilson(50, 50)[1] == 1.0
    assert wilson(0, 50)[1] == pytest.approx(3.8414588 / 53.8414588)
    assert wilson(0, 0) == (0.0, 1.0)


def test_share_names_its_fields():
    assert share(1, 4, "held", "robust_accuracy")["robust_accuracy"] == 0.25


def test_the_interval_of_a_mean_is_seeded_and_as_wide_as_it_should_be():
    values = np.random.default_rng(2).normal(3.0, 2.0, 900)
    low, high = bootstrap_mean(values, seed=5)
    assert (low, high) == bootstrap_mean(values, seed=5)
    assert (low, high) != bootstrap_mean(values, seed=6)
    reach = 1.96 * values.std() / 30
    assert (low, high) == pytest.approx((values.mean() - reach, values.mean() + reach), abs=0.25 * reach)
    assert bootstrap_mean(np.full(7, 0.25)) == (0.25, 0.25)
    coins = np.arange(400) % 2
    assert bootstrap_mean(coins) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.005)


@pytest.mark.parametrize("kind", [np.float64, np.float32, bool])
def test_resamples_are_those_of_one_round_after_another(kind, monkeypatch):
    for n in (1, 7, 300):
        values = np.random.default_rng(n).normal(0.5, 1, n).astype(kind)
        rng = np.random.default_rng(4)
        means = [values[rng.integers(n, size=n)].mean(dtype=np.float64) for _ in range(50)]
        for at_once in (1, 5 * n + 2, 2**16):
            monkeypatch.setattr(statistics, "_AT_ONCE", at_once)
            assert bootstrap_mean(values, seed=4, rounds=50) == tuple(np.quantile(means, [0.025, 0.975]))


def test_single_precision_is_averaged_in_double():
    assert bootstrap_mean(np.full(1000, 0.1, np.float32)) == pytest.approx((float(np.float32(0.1)),) * 2, rel=1e-12)


def test_sign_flips_give_the_exact_share_of_sums_as_large():
    differences = np.array([3.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    signs = np.array(np.meshgrid(*[(-1, 1)] * 6)).reshape(6, -1).T
    exact = np.mean(abs(signs @ differences) >= differences.sum())
    assert sign_flip_test(differences) == pytest.approx(exact, abs=0.006)
    assert sign_flip_test(np.zeros(5)) == 1.0
    assert sign_flip_test(np.ones(60)) == pytest.approx(1e-4)
