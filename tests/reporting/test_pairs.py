"""Comparisons of two runs, with answers known from definitions, closed forms and simulation."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from run_folders import write_run
from vitadel.reporting.comparison import pair_rows, pairings, why_not_paired
from vitadel.reporting.read_runs import Run, read_run
from vitadel.statistics import difference_interval, holm, mcnemar

YES, NO = True, False
EIGHT = [YES] * 8


def test_mcnemar_is_the_exact_binomial() -> None:
    def by_definition(b: int, c: int) -> Fraction:
        n = b + c
        as_extreme = [k for k in range(n + 1) if abs(2 * k - n) >= abs(b - c)]
        return sum((Fraction(math.comb(n, k), 2**n) for k in as_extreme), Fraction(0))

    for b in range(12):
        for c in range(12):
            assert mcnemar(b, c) == pytest.approx(float(by_definition(b, c)), rel=1e-12)
    assert mcnemar(5, 0) == 2 / 32
    assert mcnemar(0, 0) == 1
    assert 0 <= mcnemar(0, 4000) < 1e-300  # thousands of discordant samples neither overflow nor fail


def test_pairs_count_who_holds_what(tmp_path: Path) -> None:
    one = [YES] * 6 + [NO] * 2
    other = [YES, NO, NO, NO, NO, NO, YES, NO]
    first = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": one}))
    second = read_run(write_run(tmp_path / "b", correct=[YES] * 7 + [NO], attacks={"fgsm": other}))
    clean, worst = pair_rows(first, second)
    assert (clean.both, clean.only_first, clean.only_second, clean.neither) == (7, 1, 0, 0)
    assert (worst.both, worst.only_first, worst.only_second, worst.neither) == (1, 5, 1, 1)
    assert worst.p_value == 2 * (1 + 6) / 64


def test_only_the_same_images_are_paired(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": EIGHT}))
    moved = read_run(write_run(tmp_path / "b", correct=EIGHT, attacks={"fgsm": EIGHT}, first_index=4))
    other = read_run(write_run(tmp_path / "c", correct=EIGHT, attacks={"fgsm": EIGHT}, data="cifar10"))
    started = read_run(write_run(tmp_path / "d", correct=EIGHT, attacks={"fgsm": EIGHT}, pending=["pgd-20"]))
    assert pair_rows(base, moved) == pair_rows(base, other) == pair_rows(base, started) == []


def test_worst_cases_are_paired_only_under_one_threat(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": EIGHT}))
    weaker = read_run(write_run(tmp_path / "b", correct=EIGHT, attacks={"fgsm": EIGHT}, eps="1/255"))
    assert [row.what for row in pair_rows(base, weaker)] == ["clean"]


def test_differences_are_reported_with_their_size(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": [YES] * 6 + [NO] * 2}))
    second = read_run(write_run(tmp_path / "b", correct=EIGHT, attacks={"fgsm": [YES] * 2 + [NO] * 6}))
    worst = pair_rows(first, second)[1]
    assert worst.difference == 0.5
    assert worst.ci95[0] < 0.5 < worst.ci95[1]
    back = pair_rows(second, first)[1]
    assert (back.difference, back.p_value) == (-0.5, worst.p_value)
    assert back.ci95 == pytest.approx((-worst.ci95[1], -worst.ci95[0]), abs=0.11)  # one image of the resampled ten


@pytest.mark.parametrize(("better", "worse", "n"), [(0.1, 0.1, 200), (0.12, 0.02, 200), (0.004, 0.0, 500)])
def test_intervals_cover_the_truth_as_often_as_they_say(better: float, worse: float, n: int) -> None:
    rng, interval, hits = np.random.default_rng(5), functools.cache(difference_interval), 0
    for only_first, only_second, _ in rng.multinomial(n, (better, worse, 1 - better - worse), size=400):
        low, high = interval(int(only_first), int(only_second), n)
        hits += low <= better - worse <= high
    assert hits / 400 > 0.925  # 95 % less two standard errors of 400 trials


def test_intervals_agree_with_the_normal_one_for_many_images() -> None:
    b, c, n = 900, 600, 10_000
    spread = 1.96 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    assert difference_interval(b, c, n) == pytest.approx((0.03 - spread, 0.03 + spread), abs=4e-4)


def test_two_models_that_never_differed_may_still_differ() -> None:
    low, high = difference_interval(0, 0, 50)
    assert low < -0.01 < 0.01 < high
    narrow = difference_interval(0, 0, 5_000)
    assert high > narrow[1] > 0
    assert difference_interval(0, 0, 0) == (-1, 1)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_what_may_not_be_compared_is_said(tmp_path: Path) -> None:
    def made(name: str, **more: Any) -> Run:
        return read_run(write_run(tmp_path / name, **{"correct": EIGHT, "attacks": {"fgsm": EIGHT}, **more}))

    base, same = made("a", model="a"), made("b", model="b")
    assert why_not_paired(base, same) == ""
    (pair,) = pairings([base, same])
    assert (pair.first, pair.second, pair.remark) == ("a", "b", "")
    assert [row.p_holm for row in pair.rows] == [1, 1]
    (pair,) = pairings([base, made("c", data="cifar10")])
    assert pair.rows == ()
    assert pair.remark == "Not compared: they saw different data (shapes, cifar10)."
    (pair,) = pairings([base, made("d", first_index=4)])
    assert pair.remark == "Not compared: they saw different images of the same data."
    (pair,) = pairings([base, made("e", eps="1/255")])
    assert [row.what for row in pair.rows] == ["clean"]
    assert pair.remark == "Worst cases not compared: the threats differ (Linf 8/255, Linf 1/255)."
    for name, attacks in (("f", {"pgd-20": EIGHT}), ("g", {"fgsm": EIGHT, "pgd-20": EIGHT})):
        (pair,) = pairings([base, made(name, attacks=attacks)])
        assert [row.what for row in pair.rows] == ["clean"]
        assert "the attacks differ" in pair.remark
    for name, more, reported in (
        ("i", {"size": 32}, "images of a different size are a different threat (8 x 8, 32 x 32)"),
        ("j", {"precision": "fp16"}, "attacks and verdicts were computed in different precisions (fp32, fp16)"),
    ):
        (pair,) = pairings([base, made(name, **more)])
        assert [row.what for row in pair.rows] == ["clean"]
        assert pair.remark == f"Worst cases not compared: {reported}."


def test_a_run_without_verdicts_yet_is_not_left_out_unsaid(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": EIGHT}, model="a"))
    path = write_run(tmp_path / "b", correct=EIGHT, attacks={"fgsm": EIGHT}, model="b", pending=["pgd-20"])
    (pair,) = pairings([base, read_run(path)])
    assert (pair.first, pair.second, pair.rows) == ("a", "b", ())
    assert pair.remark == "Not compared: one of them has no verdicts of single images yet."
    ended = read_run(path)
    ended.results["complete"] = True  # such as a study, which never has any
    assert pairings([base, ended]) == []


def test_the_same_attacks_in_another_order_are_the_same_test(tmp_path: Path) -> None:
    first = read_run(write_run(tmp_path / "a", correct=EIGHT, attacks={"fgsm": EIGHT, "pgd-20": EIGHT}))
    second = read_run(write_run(tmp_path / "b", correct=EIGHT, attacks={"pgd-20": EIGHT, "fgsm": EIGHT}))
    (pair,) = pairings([first, second])
    assert ([row.what for row in pair.rows], pair.remark) == (["clean", "worst case"], "")


@pytest.mark.parametrize("suites", [("ladder", "ladder"), ("ladder", None), (None, "trade-off")])
def test_worst_cases_over_several_budgets_are_not_compared(
    tmp_path: Path, suites: tuple[str | None, str | None]
) -> None:
    runs = []
    for name, suite in zip("ab", suites, strict=True):
        run = read_run(write_run(tmp_path / name, correct=EIGHT, attacks={"fgsm": EIGHT}, model=name))
        run.results["suite"] = suite
        runs.append(run)
    (pair,) = pairings(runs)
    assert [row.what for row in pair.rows] == ["clean"]
    assert pair.remark.startswith("Worst cases not compared: not all attacks had the same budget")


def test_p_values_are_adjusted_over_all_pairs(tmp_path: Path) -> None:
    ways = ([YES] * 40, [YES] * 34 + [NO] * 6, [YES] * 30 + [NO] * 10)
    runs = [
        read_run(write_run(tmp_path / str(place), correct=[YES] * 40, attacks={"fgsm": way}, model=str(place)))
        for place, way in enumerate(ways)
    ]
    found = pairings(runs)
    assert [(pair.first, pair.second) for pair in found] == [("0", "1"), ("0", "2"), ("1", "2")]
    smallest = found[1].rows[1].p_value
    assert smallest == 2 / 2**10
    assert found[1].rows[1].p_holm == 6 * smallest  # six comparisons in all
