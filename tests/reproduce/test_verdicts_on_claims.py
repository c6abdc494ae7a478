"""Verdicts on claims: known counts give known verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from vitadel.papers.paper_documents import find_item
from vitadel.reproduce.measurements import Cell
from vitadel.reproduce.verdicts_on_claims import FAILS, HOLDS, OPEN, compare, judge_claims
from vitadel.statistics import mcnemar


def verdicts(hits: int, n: int = 100, start: int = 0) -> Cell:
    images = np.zeros(n)
    images[start : start + hits] = 1
    return Cell(hits / n, (0, 1), n, images, np.arange(n))


def verdict_on(higher: list[Cell], lower: list[Cell]) -> dict:
    item = find_item("aas/table4")[1]
    cells = {("pgd-at+aas", "autoattack"): higher, ("pgd-at", "autoattack"): lower}
    (entry,) = judge_claims(item, cells)
    return entry


def test_one_seed_is_mcnemars_test():
    compared = compare([verdicts(60)], [verdicts(40)])
    assert compared.p == mcnemar(20, 0)
    assert compared.difference == pytest.approx(0.2)
    crossed = compare([verdicts(50)], [verdicts(40, start=30)])
    assert crossed.p == mcnemar(30, 20)


@pytest.mark.parametrize(
    ("higher", "lower", "verdict"),
    [
        ([60], [40], HOLDS),
        ([40], [60], FAILS),
        ([50], [49], OPEN),
        ([50], [50], OPEN),
        ([60, 61], [40, 40], HOLDS),
        ([90, 40], [40, 41], OPEN),  # seeds disagree, whatever the images say
    ],
)
def test_known_counts_give_known_verdicts(higher, lower, verdict):
    assert verdict_on([verdicts(each) for each in higher], [verdicts(each) for each in lower])["verdict"] == verdict


def test_other_images_are_not_compared_in_pairs():
    moved = Cell(0.2, (0, 1), 100, verdicts(20).images, np.arange(100) + 1)
    entry = verdict_on([verdicts(90)], [moved])
    assert entry["p"] is None
    assert entry["verdict"] == OPEN


def test_means_are_compared_by_permutation_and_counts_exactly():
    rng = np.random.default_rng(0)
    low, index = rng.uniform(size=200), np.arange(200)

    def mean(values):
        return Cell(float(values.mean()), (0, 1), 200, values, index)

    assert verdict_on([mean(low + 0.1)], [mean(low)])["verdict"] == HOLDS
    assert verdict_on([mean(low + rng.normal(size=200))], [mean(low + rng.normal(size=200))])["verdict"] == OPEN
    assert verdict_on([Cell(2.0, exact=True)], [Cell(1.0, exact=True)])["verdict"] == HOLDS
    assert verdict_on([Cell(1.0, exact=True)], [Cell(2.0, exact=True)])["verdict"] == FAILS


def test_p_values_are_adjusted_over_the_table():
    item = find_item("aas/table4")[1]
    cells = {
        ("pgd-at+aas", "autoattack"): [verdicts(56)],
        ("pgd-at", "autoattack"): [verdicts(50)],
        ("trades+aas", "autoattack"): [verdicts(56)],
        ("trades", "autoattack"): [verdicts(50)],
    }
    alone = judge_claims(item, dict(list(cells.items())[:2]))
    both = judge_claims(item, cells)
    assert alone[0]["p"] == mcnemar(6, 0) < 0.05
    assert alone[0]["verdict"] == HOLDS
    assert both[0]["p"] == 2 * mcnemar(6, 0) > 0.05
    assert {entry["verdict"] for entry in both} == {OPEN}
    assert both[0]["published"] == pytest.approx(27.32 - 25.78)
