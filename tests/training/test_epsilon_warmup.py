"""The budget of each epoch by hand."""

from __future__ import annotations

import math

import pytest
from torch import nn
from training_toys import FakeTraining

from vitadel.attacks import PGD, Linf
from vitadel.attacks.steppers import Steepest
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import UserError
from vitadel.training.interfaces import ChangesAttack
from vitadel.training.objectives.cross_entropy import Adversarial, Standard
from vitadel.training.plugins.epsilon_warmup import EpsilonWarmup


class Budgetless:
    def __call__(self, model, x, y, rng=None):
        return x

    def passes(self):
        return 0, 0


@pytest.mark.parametrize(
    ("plugin", "shares"),
    [
        (EpsilonWarmup(4), [0, 0.25, 0.5, 0.75, 1, 1]),
        (EpsilonWarmup(5, zero_epochs=1), [0, 0, 0.25, 0.5, 0.75, 1]),
        (EpsilonWarmup(1), [0, 1, 1]),
        (EpsilonWarmup(4, shape="sine"), [0, (1 - math.sqrt(0.5)) / 2, 0.5, (1 + math.sqrt(0.5)) / 2, 1, 1]),
        (EpsilonWarmup(4, zero_epochs=2, shape="sine"), [0, 0, 0, 0.5, 1]),
    ],
)
def test_table(plugin, shares):
    assert [plugin.eps_at(epoch, 8.0) for epoch in range(len(shares))] == pytest.approx([8 * s for s in shares])


@pytest.mark.parametrize("shape", ["linear", "sine"])
def test_zero_and_full_are_exact(shape):
    plugin = EpsilonWarmup(7, 2, shape)
    assert [plugin.eps_at(epoch, 8 / 255) for epoch in (0, 1, 2, 7, 100)] == [0, 0, 0, 8 / 255, 8 / 255]


def test_attacks_get_the_budget_and_keep_their_step():
    attack = Restarts(PGD(Linf(8 / 255), stepper=Steepest(2 / 255), steps=3), 2)
    run = FakeTraining(nn.Identity())
    plugin = EpsilonWarmup(4)
    assert isinstance(plugin, ChangesAttack)
    assert plugin.change_attack(run, attack) is None
    assert run.logged == {"eps": 0.0}
    run.epoch = 1
    assert plugin.change_attack(run, attack) == Restarts(PGD(Linf(2 / 255), stepper=Steepest(2 / 255), steps=3), 2)
    assert run.logged["eps"] == pytest.approx(2 / 255)
    run.epoch = 4
    assert plugin.change_attack(run, attack) is attack
    assert run.logged["eps"] == 8 / 255


@pytest.mark.parametrize("settings", [{"epochs": 0}, {"epochs": 3, "zero_epochs": 3}, {"epochs": 3, "zero_epochs": -1}])
def test_lengths_that_make_no_sense(settings):
    with pytest.raises(UserError, match="fewer zero_epochs than epochs"):
        EpsilonWarmup(**settings)


def test_unknown_shape():
    with pytest.raises(UserError, match=r"'square'.*linear, sine"):
        EpsilonWarmup(3, shape="square")


@pytest.mark.parametrize("start_eps", [-1 / 255, float("inf"), float("nan")])
def test_a_start_eps_that_makes_no_sense(start_eps):
    with pytest.raises(UserError, match="start_eps must be a finite number of at least 0"):
        EpsilonWarmup(3, start_eps=start_eps)


def test_a_first_budget_above_the_full_one_is_reported_before_and_in_training():
    attack = PGD(Linf(4 / 255), steps=1)
    warm_up = EpsilonWarmup(3, start_eps=5 / 255)
    with pytest.raises(UserError, match=r"to 4/255 cannot start at 5/255"):
        warm_up.check_objective(Adversarial(attack), Linf(4 / 255))
    with pytest.raises(UserError, match=r"to 4/255 cannot start at 5/255"):
        warm_up.change_attack(FakeTraining(nn.Identity(), threat=Linf(4 / 255)), attack)
    warm_up.check_objective(Adversarial(attack), Linf(5 / 255))
    with pytest.raises(UserError, match="has no attack whose eps could grow"):
        warm_up.check_objective(Standard(), Linf(5 / 255))


def test_an_attack_without_a_budget_is_reported():
    with pytest.raises(UserError, match="eps of Budgetless cannot be changed"):
        EpsilonWarmup(3).check_objective(Adversarial(Budgetless()), Linf(4 / 255))


def test_a_warm_up_may_start_above_zero():
    warm_up = EpsilonWarmup(epochs=4, start_eps=2 / 255)
    assert [255 * warm_up.eps_at(epoch, 10 / 255) for epoch in range(6)] == pytest.approx([2, 4, 6, 8, 10, 10])
