"""AttackBench's optimality, as `benchmarks/optimality.py` computes it, where the answer is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitadel.evaluation.selftest import LinearToy


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import optimality

    return optimality


def test_areas_taken_off_by_hand(bench: Any):
    """The best known curve of 1, 2, 3, 4 takes 1.5 off the rectangle of 1 and 4; one that finds 2 and 4 takes 0.5."""
    best = np.array([1.0, 2.0, 3.0, 4.0])
    assert bench.local_optimality(best, best) == 1
    assert bench.local_optimality(np.array([2.0, 4.0, math.inf, math.inf]), best) == pytest.approx(1 / 3)
    assert bench.local_optimality(np.full(4, math.inf), best) == 0
    with_wrong = np.append(best, 0.0)  # a misclassified image: all five areas are 4/5 of these
    assert bench.local_optimality(np.array([2.0, 4.0, math.inf, math.inf, 0.0]), with_wrong) == pytest.approx(1 / 3)


def test_a_curve_that_never_ends_is_cut_at_its_largest_distance(bench: Any):
    best = np.array([1.0, 2.0, math.inf])
    assert bench.area_below(best, 2.0) == pytest.approx(5 / 3)
    assert bench.local_optimality(np.array([2.0, 2.0, math.inf]), best) == 0
    assert math.isnan(bench.local_optimality(np.full(3, math.inf), np.full(3, math.inf)))


def test_distances_in_proportion_lose_in_proportion(bench: Any):
    """Uniform distances up to 1 leave half of the square; a times larger they take off a share of 1/(2a)."""
    best = (np.arange(10_000) + 0.5) / 10_000
    for factor in (1.0, 1.5, 4.0):
        assert bench.local_optimality(factor * best, best) == pytest.approx(1 / factor, abs=1e-3)


def test_the_best_attack_on_a_plane_is_the_exact_distance(bench: Any):
    """Each attack beside the closed form, |w x + b| / |w|; misclassified images have the distance zero."""
    pytest.importorskip("foolbox")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, generator=generator)
    x = 0.5 + 0.05 * torch.randn(8, 3, 4, 4, generator=generator).clamp(-2, 2)
    toy = LinearToy(weight, bias=0.4 - 0.5 * float(weight.sum()))
    y = toy(x).argmax(1)
    y[0] = 1 - y[0]
    exact = (toy(x)[:, 1].detach().abs() / weight.norm()).double().numpy()
    exact[0] = 0
    runs = bench.candidates("l2", 100, 48)
    for name in ("ddn", "fmn", "superdeepfool"):
        found = bench.measure(runs[name], toy, "l2", x, y)
        assert found.distances[0] == 0
        assert found.propagations <= 220
        assert bench.local_optimality(found.distances, exact) == pytest.approx(1, abs=0.03)
    rows = bench.table("l2", [{"ddn": found, "nothing": bench.Measured(np.where(exact, np.inf, 0), 2.0)}])
    assert rows[0].startswith("| l2 | ddn |")
    assert rows[0].endswith("| 1.000 | 1.000 |")
    assert rows[1].endswith("| 2 | 7 | inf | 0.000 | 0.000 |")


def test_scores_are_those_of_attackbench(bench: Any):
    library = pytest.importorskip("attackbench")
    rng = np.random.default_rng(0)
    for _ in range(20):
        best = rng.exponential(size=40) * (rng.random(40) > 0.2)
        worse = np.where(rng.random(40) > 0.1, best * rng.uniform(1, 2, 40), np.inf)
        worse[best == 0] = 0
        assert bench.local_optimality(worse, best) == pytest.approx(library.eval_optimality(worse, best))
