"""Results that make no sense are suspicious; differences that chance explains are not."""

from __future__ import annotations

import pytest
import torch

from vitadel.statistics import ALPHA, sign_test
from vitadel.threat_levels.sanity import findings_about_order

SMALL, LARGE = 1 / 255, 4 / 255


def first(count, n=200):
    """The first `count` of n images are correct."""
    return torch.arange(n) < count


def last(count, n=200):
    return torch.arange(n) >= n - count


def checks(held):
    return [finding["check"] for finding in findings_about_order(held)]


def test_consistent_results_raise_nothing():
    held = {
        "T2": {SMALL: first(120), LARGE: first(60)},
        "T3": {SMALL: first(80), LARGE: first(30)},
        "T6": {SMALL: first(10), LARGE: first(0)},
    }
    assert checks(held) == []


def test_more_knowledge_that_breaks_fewer_is_found():
    held = {"T2": {SMALL: first(100)}, "T4": {SMALL: first(150)}, "T6": {SMALL: first(10)}}
    (finding,) = findings_about_order(held)
    assert finding["check"] == "knowledge-order"
    assert "T2 leaves 100 of 200 correct; T4, which knows more, 150; 50 and 0 are broken by one alone" in str(finding)


def test_queries_that_beat_gradients_are_found():
    assert checks({"T5": {LARGE: first(20)}, "T6": {LARGE: first(90)}}) == ["black-box"]


def test_a_larger_budget_that_breaks_fewer_is_found():
    assert checks({"T6": {SMALL: first(10), LARGE: first(60)}}) == ["budget-order"]


@pytest.mark.parametrize("n", [200, 1000])
def test_one_image_is_chance(n):
    assert checks({"T2": {SMALL: first(0, n)}, "T3": {SMALL: first(1, n)}}) == []
    assert checks({"T5": {SMALL: first(0, n)}, "T6": {SMALL: first(1, n)}}) == []


def test_images_are_paired():
    """The same totals are chance where they differ on many images, and no chance where they differ on few."""
    assert checks({"T2": {SMALL: first(90)}, "T3": {SMALL: last(102)}}) == []  # 102 against 90 on other images
    assert checks({"T2": {SMALL: first(90)}, "T3": {SMALL: first(102)}}) == ["knowledge-order"]


def test_the_limit_is_that_of_the_exact_sign_test():
    needed = next(k for k in range(1, 100) if sign_test(k, 0) < ALPHA)
    assert checks({"T2": {SMALL: first(50)}, "T3": {SMALL: first(50 + needed)}}) == ["knowledge-order"]
    assert checks({"T2": {SMALL: first(50)}, "T3": {SMALL: first(50 + needed - 1)}}) == []
