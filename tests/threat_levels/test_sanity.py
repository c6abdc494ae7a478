"""A climb that makes no sense is called suspicious; one that does, or that chance explains, is not."""

from __future__ import annotations

from vitadel.threat_levels.sanity import findings_about_order

SMALL, LARGE = 1 / 255, 4 / 255


def checks(held, n=200):
    return [finding["check"] for finding in findings_about_order(held, n)]


def test_a_ladder_that_only_falls_is_fine():
    held = {"T2": {SMALL: 120, LARGE: 60}, "T3": {SMALL: 80, LARGE: 30}, "T6": {SMALL: 10, LARGE: 0}}
    assert checks(held) == []


def test_more_knowledge_that_helps_less_is_told():
    held = {"T2": {SMALL: 100}, "T4": {SMALL: 150}, "T6": {SMALL: 10}}
    assert checks(held) == ["T4 at least as strong as T2"]


def test_queries_that_beat_gradients_are_told():
    assert checks({"T5": {LARGE: 20}, "T6": {LARGE: 90}}) == ["gradients beat queries"]


def test_a_larger_budget_that_hurts_less_is_told():
    assert checks({"T6": {SMALL: 10, LARGE: 60}}) == ["a larger budget hurts at least as much"]


def test_small_differences_are_chance():
    assert checks({"T2": {SMALL: 100}, "T3": {SMALL: 108}}) == []
    assert checks({"T2": {SMALL: 10}, "T3": {SMALL: 13}}, n=20) == []
