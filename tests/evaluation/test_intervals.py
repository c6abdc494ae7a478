"""Wilson's interval, against numbers computed elsewhere."""

from __future__ import annotations

import pytest

from vitadel.evaluation.intervals import share, wilson


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
