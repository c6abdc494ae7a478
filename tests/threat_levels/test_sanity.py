"""Results that make no sense are suspicious; differences that chance explains are not."""

from __future__ import annotations

from vitadel.threat_levels.sanity import findings_about_order

SMALL, LARGE = 1 / 255, 4 / 255


def checks(held, n=200):
    return [finding["check"] for finding in findings_about_order(held, n)]


def test_consistent_results_raise_nothing():
    held = {"T2": {SMALL: 120, LARGE: 60}, "T3": {SMALL: 80, LARGE: 30}, "T6": {SMALL: 10, LARGE: 0}}
    assert checks(held) == []


def test_more_knowledge_that_breaks_fewer_is_found():
    held = {"T2": {SMALL: 100}, "T4": {SMALL: 150}, "T6": {SMALL: 10}}
    assert checks(held) == ["knowledge-order"]


def test_queries_that_beat_gradients_are_found():
    assert checks({"T5": {LARGE: 20}, "T6": {LARGE: 90}}) == ["black-box"]


def test_a_larger_budget_that_breaks_fewer_is_found():
    assert checks({"T6": {SMALL: 10, LARGE: 60}}) == ["budget-order"]


def test_small_differences_are_chance():
    assert checks({"T2": {SMALL: 100}, "T3": {SMALL: 108}}) == []
    assert checks({"T2": {SMALL: 10}, "T3": {SMALL: 13}}, n=20) == []
