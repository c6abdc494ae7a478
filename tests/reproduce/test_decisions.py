"""The rule of experiments on planted data: a true effect, none, and one in a single seed; and how often it errs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from vitadel.papers.experiments import Contrast, Experiment
from vitadel.reproduce.decisions import CONFIRMED, OPEN, REFUTED, _decision, decide
from vitadel.reproduce.measurements import Cell
from vitadel.statistics import bootstrap_mean, student_quantile

ARM, CONTROL = ("arm", "accuracy"), ("control", "accuracy")


def experiment(*more: Contrast, worth: float = 1.0) -> Experiment:
    first = Contrast(id="gain", question="?", column="accuracy", plus=["arm"], minus=["control"], worth=worth)
    return Experiment(question="?", design="", known="", seeds=3, contrasts=[first, *more])


def planted(effects: list[float], n: int = 1000, seed: int = 0) -> dict:
    """Verdicts of a control with 60 % and of an arm that is right this much more often; seeds differ by chance."""
    rng = np.random.default_rng(seed)
    hard, index, cells = rng.uniform(size=n), np.arange(n), {ARM: [], CONTROL: []}
    for effect in effects:
        for key, share in ((ARM, 0.6 + effect), (CONTROL, 0.6)):
            right = (hard + rng.normal(0, 0.05, size=n) < share).astype(float)
            cells[key].append(Cell(float(right.mean()), None, n, right, index))
    return cells


def decided(cells: dict, design: Experiment | None = None, trained=("arm", "control")):
    design = design or experiment()
    return decide(design, design.contrasts[0], cells, set(trained), 100.0)


def test_an_effect_in_all_seeds_is_confirmed():
    found = decided(planted([0.06, 0.06, 0.06]))
    assert found.verdict == CONFIRMED
    assert found.interval[0] < 6 < found.interval[1]


def test_no_effect_is_refuted_if_the_interval_is_below_what_matters_and_cannot_be_told_otherwise():
    assert decided(planted([0.0] * 3), experiment(worth=4)).verdict == REFUTED
    assert decided(planted([0.0] * 3, n=60), experiment(worth=1)).verdict == OPEN
    assert decided(planted([-0.06] * 3), experiment(worth=0)).verdict == REFUTED


def test_an_effect_in_one_seed_only_cannot_be_told():
    """Over images alone it would be certain: the mean gain of six points is ten deviations."""
    found = decided(planted([0.18, 0.0, 0.0]))
    assert found.images[0] > 4
    assert found.verdict == OPEN
    assert found.spread > found.difference


def test_one_seed_decides_nothing():
    found = decided(planted([0.2]))
    assert (found.verdict, found.spread, found.interval) == (OPEN, None, None)
    assert found.images[0] > 10


def test_the_interval_by_hand():
    cells = planted([0.05, 0.04, 0.07], n=200)
    found = decided(cells)
    by_image = 100 * np.mean([a.images - b.images for a, b in zip(cells[ARM], cells[CONTROL], strict=True)], axis=0)
    by_seed = [100 * (a.value - b.value) for a, b in zip(cells[ARM], cells[CONTROL], strict=True)]
    assert found.seeds == pytest.approx(by_seed)
    low, high = bootstrap_mean(by_image, level=0.95, rounds=10_000)
    half = stats.t.ppf(0.975, 2) * np.std(by_seed, ddof=1) / np.sqrt(3)
    mean = np.mean(by_seed)
    assert found.interval == pytest.approx((mean - np.hypot(mean - low, half), mean + np.hypot(high - mean, half)))


def test_errors_are_shared_among_contrasts_of_a_kind():
    second = Contrast(id="b", question="?", column="accuracy", plus=["arm"], minus=["control"])
    third = second.model_copy(update={"id": "c", "primary": False})
    design = experiment(second, third)
    assert [design.level(each) for each in design.contrasts] == [0.975, 0.975, 0.95]
    assert "intervals of 97.5 %" in design.rule
    assert decided(planted([0.06] * 3), design).level == 0.975


def test_main_effects_are_means_over_arms_and_pooled_columns_over_rows():
    cells = {(row, "accuracy"): planted([0.1] * 3)[ARM] for row in ("a", "b")}
    cells |= {(row, "accuracy"): planted([0.1] * 3)[CONTROL] for row in ("c", "d")}
    effect = Contrast(id="x", question="?", column="accuracy", plus=["a", "b"], minus=["c", "d"])
    design = Experiment(question="?", design="", known="", seeds=3, contrasts=[effect])
    assert decide(design, effect, cells, set("abcd")).difference == pytest.approx(
        np.mean([each.value for each in planted([0.1] * 3)[ARM]])
        - np.mean([each.value for each in planted([0.1] * 3)[CONTROL]])
    )
    pooled = Contrast(id="y", question="?", rows=["a", "b"], plus=["one"], minus=["other"])
    assert pooled.cells("plus") == [("a", "one"), ("b", "one")]


def test_what_cannot_be_paired_is_not_decided():
    cells = planted([0.1] * 3)
    moved = [Cell(each.value, None, each.n, each.images, each.index + 1) for each in cells[CONTROL]]
    assert "different images" in decided({**cells, CONTROL: moved}).why
    bare = [Cell(each.value) for each in cells[CONTROL]]
    assert "no number for each image" in decided({**cells, CONTROL: bare}).why
    assert decided({ARM: cells[ARM]}).why == "not measured: accuracy of control"
    assert "fewer seeds" in decided({**cells, CONTROL: cells[CONTROL][:1]}).why
    # A model that is not trained here is the same for all seeds.
    assert decided({**cells, CONTROL: cells[CONTROL][:1]}, trained=("arm",)).verdict == CONFIRMED


@pytest.mark.parametrize("seeds", [2, 3, 5])
@pytest.mark.parametrize(("over_seeds", "over_images", "rest"), [(0, 1, 1), (0.05, 0, 1), (0.2, 1, 1), (0.1, 0.3, 0.3)])
def test_the_rule_errs_at_most_as_often_as_it_says(seeds, over_seeds, over_images, rest, monkeypatch):
    """No effect, whatever makes the results vary; the bootstrap over images is replaced by its normal limit."""

    def normal(values, level, rounds):
        half = stats.norm.ppf((1 + level) / 2) * values.std(ddof=1) / np.sqrt(len(values))
        return values.mean() - half, values.mean() + half

    monkeypatch.setattr("vitadel.reproduce.decisions.bootstrap_mean", normal)
    rng, wrong, rounds = np.random.default_rng(1), 0, 600
    for _ in range(rounds):
        noise = rng.normal(0, rest, (seeds, 100)) + rng.normal(0, over_images, 100)
        found = _decision(noise + rng.normal(0, over_seeds, (seeds, 1)), 0.95, 0.0)
        wrong += found.verdict != OPEN
    assert wrong / rounds < 0.07  # 5 % and two deviations of the count


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 30])
def test_students_quantiles(freedom):
    for p in (0.6, 0.975, 0.99583):
        assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-6)
