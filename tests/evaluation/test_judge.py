"""The judge counts nothing that breaks the rules."""

from __future__ import annotations

import pytest
import torch

from vitadel.attacks.threats import NORMS, make_threat
from vitadel.evaluation.engine.stages import judge
from vitadel.evaluation.selftest import LinearToy

X = torch.full((1, 3, 2, 2), 0.5)
TOY = LinearToy(torch.ones(12), -5.5)  # says 1 while the pixels add up to more than 5.5
ONE = torch.tensor([1])


def moved(shift: float) -> torch.Tensor:
    return X + shift


def test_a_rightful_success_counts():
    verdict = judge(TOY, make_threat("linf", 0.1), X, moved(-0.1), ONE)
    assert not verdict.held.item()
    assert not verdict.void.item()
    assert verdict.prediction.item() == 0


def test_a_failure_holds():
    verdict = judge(TOY, make_threat("linf", 0.1), X, moved(-0.01), ONE)
    assert verdict.held.item()
    assert not verdict.void.item()


@pytest.mark.parametrize("norm", NORMS)
def test_beyond_the_budget_is_void(norm):
    eps = {"linf": 0.1, "l2": 0.1 * 12**0.5, "l1": 1.2}[norm]
    assert not judge(TOY, make_threat(norm, eps), X, moved(-0.1), ONE).void.item()
    verdict = judge(TOY, make_threat(norm, eps * 0.999), X, moved(-0.1), ONE)
    assert verdict.void.item()
    assert verdict.held.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.01, 1.01])
def test_outside_the_box_or_not_a_number_is_void(value):
    z = moved(-0.1)
    z[0, 0, 0, 0] = value
    verdict = judge(TOY, make_threat("linf", 1.0), X, z, ONE)
    assert verdict.void.item()
    assert verdict.held.item()


def test_another_shape_is_our_fault():
    with pytest.raises(ValueError, match="shape"):
        judge(TOY, make_threat("linf", 1.0), X, X[:, :2], ONE)
