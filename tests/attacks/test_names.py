"""Names of attacks: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import pytest

from vitadel.attacks import PGD, Restarts, make
from vitadel.attacks.names import read_attack_name, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.errors import Mistake


def test_settings_stand_in_brackets():
    attack = make("pgd-100(step=1/255,restarts=5)", eps="8/255")
    assert isinstance(attack, Restarts)
    assert attack.times == 5
    assert isinstance(attack.attack, PGD)
    assert attack.attack.steps == 100
    assert attack.attack.stepper.length == pytest.approx(1 / 255)
    assert attack.attack.threat.eps == pytest.approx(8 / 255)
    assert attack.passes() == (500, 4)


def test_everything_about_a_number_is_recorded():
    told = settings_of(make("pgd-10(restarts=3)", eps=8 / 255, norm="l2"))
    assert told["steps"] == 10
    assert told["restarts"] == 3
    assert told["threat"] == "L2"
    assert told["threat.eps"] == "8/255"
    assert told["goal.loss"] == "cross_entropy"
    assert settings_of(make("fgsm"))["restarts"] == 1


def test_lists_split_outside_brackets():
    assert split_attack_list("fgsm, pgd-20(step=1/255,restarts=2),pgd-5") == [
        "fgsm",
        "pgd-20(step=1/255,restarts=2)",
        "pgd-5",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pdg-20", "did you mean pgd"),
        ("", "unknown attack"),
        ("fgsm-3", "takes no number of steps"),
        ("pgd-20(stepp=1)", "did you mean step"),
        ("pgd-20(restarts=two)", "whole number"),
        ("pgd-20(restarts=1.5)", "whole number"),
        ("pgd-20(random_start=3)", "true or false"),
        ("pgd-20(step=big)", "a number"),
        ("pgd-20(step)", "no setting 'step'|write them like"),
        ("pgd-20(restarts=2", "not readable"),
        ("pgd-20(step=0)", "must be positive"),
        ("pgd-20(step=-1/255)", "must be positive"),
        ("gama-10(until=0)", "must be positive"),
        ("pgd-20(steps=5)", "twice"),
        ("pgd-20(restarts=2,restarts=3)", "twice"),
    ],
)
def test_wrong_names_are_told(text, said):
    with pytest.raises(Mistake, match=said):
        read_attack_name(text)


@pytest.mark.parametrize("text", ["fgsm,,pgd-20", ",", "fgsm,"])
def test_empty_names_are_told(text):
    with pytest.raises(Mistake, match="empty name"):
        split_attack_list(text)


def test_no_steps_are_told():
    with pytest.raises(Mistake, match="at least 1 step"):
        make("pgd-0")
