"""Consistency of the results: more knowledge or more budget must not make an attacker weaker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from torch import Tensor

from vitadel.findings import SUSPICIOUS, Finding
from vitadel.quantities import quantity_text
from vitadel.statistics import significantly_fewer

_KNOWS_MORE = ("T2", "T3", "T4", "T6")

Held = Mapping[str, Mapping[float, Tensor]]
"""Level -> budget -> which of the same images are still correct."""


def findings_about_order(held: Held) -> list[dict[str, Any]]:
    """Find every place where a stronger attacker breaks fewer images, by more than chance explains.

    Levels are compared image by image (an exact sign test on images that only one of them breaks).
    """
    budgets = sorted({eps for by_eps in held.values() for eps in by_eps})
    return [*_by_knowledge(held, budgets), *_by_queries(held, budgets), *_by_budget(held)]


def _clearly_more(stronger: Tensor, weaker: Tensor) -> bool:
    return significantly_fewer(stronger, weaker, 0.0)


def _decided_by(stronger: Tensor, weaker: Tensor) -> str:
    """The counts that the test compares."""
    return f"{int((stronger & ~weaker).sum())} and {int((weaker & ~stronger).sum())} are broken by one alone"


def _by_knowledge(held: Held, budgets: list[float]) -> Iterator[dict[str, Any]]:
    for eps in budgets:
        known = [(code, held[code][eps]) for code in _KNOWS_MORE if eps in held.get(code, {})]
        for (low, before), (high, after) in pairwise(known):
            if _clearly_more(after, before):
                yield _suspicious(
                    "knowledge-order",
                    f"{high} knows more than {low} and breaks fewer images",
                    f"at {quantity_text(eps)} {low} leaves {int(before.sum())} of {len(before)} correct; {high}, which "
                    f"knows more, {int(after.sum())}; {_decided_by(after, before)}",
                    "give the attacks more steps, and look for masked gradients",
                )


def _by_queries(held: Held, budgets: list[float]) -> Iterator[dict[str, Any]]:
    for eps in budgets:
        queries, white = (held.get(code, {}).get(eps) for code in ("T5", "T6"))
        if queries is not None and white is not None and _clearly_more(white, queries):
            yield _suspicious(
                "black-box",
                "Score queries break more images than white-box attacks",
                f"at {quantity_text(eps)} score queries leave {int(queries.sum())} of {len(queries)} correct, the "
                f"white-box attacks {int(white.sum())}; {_decided_by(white, queries)}",
                "gradients are masked: the white-box number is an upper bound only",
            )


def _by_budget(held: Held) -> Iterator[dict[str, Any]]:
    for code, by_eps in held.items():
        for (small, before), (large, after) in pairwise(sorted(by_eps.items(), key=lambda entry: entry[0])):
            if _clearly_more(after, before):
                yield _suspicious(
                    "budget-order",
                    f"{code} breaks fewer images with a larger budget",
                    f"{code}: {int(before.sum())} of {len(before)} are correct at {quantity_text(small)}, and "
                    f"{int(after.sum())} at {quantity_text(large)}; {_decided_by(after, before)}",
                    "the attack is too weak at the larger budget: give it more steps",
                )


def _suspicious(check: str, title: str, evidence: str, advice: str) -> dict[str, Any]:
    return Finding(check, SUSPICIOUS, evidence, advice, title).as_dict()
