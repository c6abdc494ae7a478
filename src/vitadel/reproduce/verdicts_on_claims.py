"""Does a claimed ordering hold? Paired tests over images, agreement over training seeds, and Holm's correction.

The rule, fixed before any table was run: images are the samples. For every image the difference of both cells is summed
over seeds; of yes-or-no verdicts the signs of these sums are tested (for one seed this is McNemar's exact test), of
other numbers their mean, by a paired permutation test. P-values are adjusted over all claims of a table. A
claim holds, or does not hold, if the test says so at 5 % and, with several seeds, every seed has the same sign. In all
other cases it cannot be told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitadel.papers.paper_documents import Item
from vitadel.reproduce.measurements import Cell
from vitadel.statistics import bootstrap_mean, holm, mcnemar, sign_flip_test

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
LEVEL = 0.05
Cells = Mapping[tuple[str, str], Sequence[Cell]]
"""(row, column) -> the cells of all seeds."""


@dataclass(frozen=True)
class Comparison:
    """Two cells over all seeds: their mean difference, its interval, and the test."""

    difference: float
    ci95: tuple[float, float] | None
    p: float | None
    agree: bool
    seeds: int
    n: int | None
    exact: bool


def compare(higher: Sequence[Cell], lower: Sequence[Cell]) -> Comparison | None:
    """None if a cell is missing. Cells without a number per image have no test, unless they are exact."""
    pairs = [pair for pair in zip(higher, lower, strict=False) if None not in (pair[0].value, pair[1].value)]
    if not pairs:
        return None
    differences = [float(one.value or 0) - float(other.value or 0) for one, other in pairs]
    agree = len({np.sign(each) for each in differences}) == 1
    exact = all(one.exact and other.exact for one, other in pairs)
    mean = float(np.mean(differences))
    per_image = [_difference(one, other) for one, other in pairs]
    known = [each for each in per_image if each is not None]
    if len(known) < len(pairs):
        return Comparison(mean, None, None, agree, len(pairs), pairs[0][0].n, exact)
    sums = np.sum(known, axis=0)
    low, high = bootstrap_mean(sums / len(known))
    if all(_is_verdict(each) for pair in pairs for each in pair):
        p = mcnemar(int((sums > 0).sum()), int((sums < 0).sum()))
    else:
        p = sign_flip_test(sums)
    return Comparison(mean, (low, high), p, agree, len(pairs), len(sums), exact)


def _difference(one: Cell, other: Cell) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    if one.images is None or other.images is None or one.index is None or other.index is None:
        return None
    if len(one.index) != len(other.index) or not np.array_equal(one.index, other.index):
        return None  # other images were evaluated
    return one.images - other.images


def _is_verdict(cell: Cell) -> bool:
    return cell.images is not None and bool(np.isin(cell.images, (0.0, 1.0)).all())


def judge_claims(item: Item, cells: Cells) -> list[dict[str, Any]]:
    """Every comparison of every claim whose cells were measured, with its verdict."""
    found: list[tuple[dict[str, Any], Comparison]] = []
    for ordering in item.orderings:
        for higher, lower in ordering.pairs():
            compared = compare(cells.get(higher, ()), cells.get(lower, ()))
            if compared is not None:
                one, other = item.published(*higher), item.published(*lower)
                published = None if one is None or other is None else one - other
                entry = {"claim": ordering.claim, "higher": list(higher), "lower": list(lower), "published": published}
                found.append((entry, compared))
    tested = [place for place, (_, each) in enumerate(found) if each.p is not None]
    adjusted = dict(zip(tested, holm([float(found[place][1].p or 0) for place in tested]), strict=True))
    return [
        {
            **entry,
            "difference": each.difference,
            "ci95": None if each.ci95 is None else list(each.ci95),
            "p": adjusted.get(place),
            "n": each.n,
            "seeds": each.seeds,
            "verdict": _verdict(each, adjusted.get(place)),
        }
        for place, (entry, each) in enumerate(found)
    ]


def _verdict(compared: Comparison, p: float | None) -> str:
    if compared.exact:
        return HOLDS if compared.difference > 0 else FAILS
    if p is None or p >= LEVEL or not compared.agree or compared.difference == 0:
        return OPEN
    return HOLDS if compared.difference > 0 else FAILS
