"""The learning rate at known moments."""

from __future__ import annotations

import pytest

from vitadel.training.recipes.training_sections import OptimizerSection, Schedule


@pytest.mark.parametrize(
    ("progress", "rate"),
    [(0, 0.1), (2.5, 0.55), (5, 1.0 * 0.5 * (1 + 0.7071067811865476)), (10, 0.5), (20, 0.0), (23, 0.0)],
)
def test_a_cosine_with_warm_up_and_cool_down(progress, rate):
    schedule = Schedule("cosine", warmup_epochs=5, warmup_lr=0.1, cooldown_epochs=3)
    assert schedule.lr_at(1.0, 20, progress) == pytest.approx(rate, abs=1e-12)


def test_a_cosine_ends_at_its_min_lr():
    schedule = Schedule("cosine", min_lr=0.2)
    assert [schedule.lr_at(1.0, 10, p) for p in (0, 5, 10)] == pytest.approx([1.0, 0.6, 0.2])


def test_a_cycle_rises_and_falls():
    schedule = Schedule("cyclic", pct_start=0.4)
    assert [schedule.lr_at(0.2, 15, p) for p in (0, 3, 6, 10.5, 15)] == pytest.approx([0, 0.1, 0.2, 0.1, 0])


def test_a_cycle_between_other_rates_than_zero_with_a_cool_down():
    schedule = Schedule("cyclic", pct_start=0.25, warmup_lr=0.2, min_lr=0.1, cooldown_epochs=2)
    rates = [schedule.lr_at(1.0, 8, progress) for progress in (0, 1, 2, 5, 8, 9.5)]
    assert rates == pytest.approx([0.2, 0.6, 1.0, 0.55, 0.1, 0.1])


def test_steps_multiply():
    schedule = Schedule("steps", milestones=(35, 38), decay_rate=0.1)
    assert [schedule.lr_at(0.1, 40, p) for p in (34.9, 35, 37.9, 38, 40)] == pytest.approx(
        [0.1, 0.01, 0.01, 0.001, 0.001]
    )


def test_a_constant_rate_may_warm_up():
    schedule = Schedule("constant", warmup_epochs=2)
    assert [schedule.lr_at(1.0, 10, p) for p in (0, 1, 2, 10)] == [0, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("optimizer", "batch", "factor"),
    [
        (OptimizerSection(lr_reference_batch=512), 128, 0.25),
        (OptimizerSection(lr_reference_batch=512, lr_scaling="sqrt"), 128, 0.5),
        (OptimizerSection(), 128, 1.0),
    ],
)
def test_rates_are_scaled_to_the_batch(optimizer, batch, factor):
    assert optimizer.lr_factor(batch) == factor
