"""The verdict over several runs names the best of those that took the same test, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pytest

from run_folders import write_run
from vitadel.reporting.comparison import headline, pairings
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import Run, read_run


def holding(path: Path, model: str, held: int, **settings: Any) -> Run:
    holds = [number < held for number in range(100)]
    chosen = {"correct": [True] * 100, "attacks": {"fgsm": holds}, "model": model, **settings}
    return read_run(write_run(path, **chosen))


def headline_of(*runs: Run) -> str:
    return headline(runs, pairings(runs))


@pytest.mark.slow
def test_the_best_is_named_with_its_lead(tmp_path: Path) -> None:
    runs = [holding(tmp_path / name, name, held) for name, held in (("a", 20), ("b", 70), ("c", 50))]
    sentence = headline_of(*runs)
    assert sentence.startswith(
        "b is the most robust: 70.0 % under fgsm with Linf 8/255 on 100 images of shapes, before c with 50.0 %. "
        "That is +20.0 points (95 % interval +"
    )  # b stands after a and before c: the difference is reported from the best
    assert sentence.endswith("p < 0.0001 by Holm over all comparisons).")
    other = headline_of(*reversed(runs))
    assert other == sentence
    assert escape(sentence.replace(" %", "\u00a0%")) in render(runs)


def test_a_difference_that_is_not_significant_is_called_too_close(tmp_path: Path) -> None:
    sentence = headline_of(holding(tmp_path / "a", "a", 52), holding(tmp_path / "b", "b", 50))
    assert "a is the most robust: 52.0 %" in sentence
    assert "Too close to call: +2.0 points" in sentence
    even = headline_of(holding(tmp_path / "c", "c", 50), holding(tmp_path / "d", "d", 50))
    assert even.startswith("c and d are equally robust: 50.0 % under fgsm")
    three = headline_of(*(holding(tmp_path / name, name, 50) for name in ("e", "f", "g")))
    assert three.startswith("e, f and g are equally robust")


def test_runs_that_took_another_test_or_none_do_not_compete(tmp_path: Path) -> None:
    a, b = holding(tmp_path / "a", "a", 30), holding(tmp_path / "b", "b", 90, eps="4/255")
    assert headline_of(a, b) == ""
    unfinished = holding(tmp_path / "c", "c", 95, pending=["square"])
    assert headline_of(a, unfinished) == ""
    clean_only = holding(tmp_path / "d", "d", 95, attacks={})
    assert headline_of(a, clean_only) == ""
    sized = [holding(tmp_path / f"s{side}", f"s{side}", side, size=side) for side in (32, 64)]
    old = replace(holding(tmp_path / "old", "old", 30, older=True), examples=None)  # which may have been like either
    assert "Of the 2 runs that took the same test" in headline_of(old, *sized)
    sentence = headline_of(a, b, unfinished, holding(tmp_path / "e", "e", 80))
    assert sentence.startswith("Of the 2 runs that took the same test, e is the most robust: 80.0 %")


@pytest.mark.parametrize("others", [0, 1])
def test_no_run_wins_where_none_is_robust(tmp_path: Path, others: int) -> None:
    runs = [holding(tmp_path / name, name, 0) for name in ("a", "b")]
    runs += [holding(tmp_path / "c", "c", 9, eps="4/255")] * others
    among = "Of the 2 runs that took the same test" if others else "Of all runs"
    sentence = (
        f"{among}, none is robust under fgsm with Linf 8/255 on 100 images of shapes: 95 % interval 0.0 to 3.7 %."
    )
    assert headline_of(*runs) == sentence
