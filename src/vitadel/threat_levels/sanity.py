"""Consistency of the results: more knowledge or more budget must not make an attacker weaker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from vitadel.findings import SUSPICIOUS, Finding
from vitadel.quantities import quantity_text
from vitadel.statistics import wilson

_KNOWS_MORE = ("T2", "T3", "T4", "T6")

Held = Mapping[str, Mapping[float, int]]
"""Level -> budget -> number of images that are still correct."""


def findings_about_order(held: Held, n: int) -> list[dict[str, Any]]:
    """Find every place where a stronger attacker breaks fewer images, by more than chance explains."""
    budgets = sorted({eps for by_eps in held.values() for eps in by_eps})
    return [*_by_knowledge(held, budgets, n), *_by_queries(held, budgets, n), *_by_budget(held, n)]


def _clearly_more(stronger: int, weaker: int, n: int) -> bool:
    return wilson(stronger, n)[0] > weaker / n


def _by_knowledge(held: Held, budgets: list[float], n: int) -> Iterator[dict[str, Any]]:
    for eps in budgets:
        known = [(code, held[code][eps]) for code in _KNOWS_MORE if eps in held.get(code, {})]
        for (low, before), (high, after) in pairwise(known):
            if _clearly_more(after, before, n):
                yield _suspicious(
                    "knowledge-order",
                    f"{high} knows more than {low} and breaks fewer images",
                    f"at {quantity_text(eps)} {low} leaves {before} of {n} correct; {high}, which knows more, {after}",
                    "give the attacks more steps, and look for masked gradients",
                )


def _by_queries(held: Held, budgets: list[float], n: int) -> Iterator[dict[str, Any]]:
    for eps in budgets:
        queries, white = (held.get(code, {}).get(eps) for code in ("T5", "T6"))
        if queries is not None and white is not None and _clearly_more(white, queries, n):
            yield _suspicious(
                "black-box",
                "Score queries break more images than white-box attacks",
                f"at {quantity_text(eps)} score queries leave {queries} of {n} correct, the white-box attacks {white}",
                "gradients are masked: the white-box number is an upper bound only",
            )


def _by_budget(held: Held, n: int) -> Iterator[dict[str, Any]]:
    for code, by_eps in held.items():
        for (small, before), (large, after) in pairwise(sorted(by_eps.items())):
            if _clearly_more(after, before, n):
                yield _suspicious(
                    "budget-order",
                    f"{code} breaks fewer images with a larger budget",
                    f"{code}: {before} of {n} are correct at {quantity_text(small)}, and {after} at "
                    f"{quantity_text(large)}",
                    "the attack is too weak at the larger budget: give it more steps",
                )


def _suspicious(check: str, title: str, evidence: str, advice: str) -> dict[str, Any]:
    return Finding(check, SUSPICIOUS, evidence, advice, title).as_dict()
