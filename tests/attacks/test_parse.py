"""Names of attacks: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import pytest

from vitadel.attacks import PGD, Restarts, make
from vitadel.attacks.parse import read_attack_name, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.errors import UserError


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
    settings = settings_of(make("pgd-10(restarts=3)", eps=8 / 255, norm="l2"))
    assert settings["steps"] == 10
    assert settings["restarts"] == 3
    assert settings["threat"] == "L2"
    assert settings["threat.eps"] == "8/255"
    assert settings["goal.loss"] == "cross_entropy"
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
        ("pgd-20(step)", "setting 'step' of attack 'pgd' has no value; write step=N"),
        ("pgd-5(restarts)", "write restarts=N"),
        ("pgd-5(random_start)", "write random_start=true"),
        ("gama-5(guide)", "write guide=NAME"),
        ("pgd-20(nonsense)", "no setting 'nonsense'"),
        ("pgd-99999999999999999999", "'steps' of attack 'pgd' must be at most 1,000,000, got 99999999999999999999"),
        (f"pgd-{'9' * 5000}", "at most 1,000,000, got 9{40}[.]{3}"),
        ("pgd(steps=1000001)", "at most 1,000,000"),
        ("pgd-20(restarts=2000000)", "at most 1,000,000"),
        ("pgd-20(step=1e40)", "at most 1,000,000"),
        ("square(queries=1000000000)", "at most 1,000,000"),
        ("eot:1000001+pgd-20", "at most 1,000,000"),
        ("targeted:least+targeted:next+pgd-20", "two targets.*keep one"),
        ("targeted:3+eot:2+targeted:4+pgd-20", "two targets.*keep one"),
        ("pgd-20(restarts=2", "cannot be parsed"),
        ("pgd-20(step=0)", "must be positive"),
        ("pgd-20(step=-1/255)", "must be positive"),
        ("gama-10(until=0)", "must be positive"),
        ("pgd-20(steps=5)", "twice"),
        ("pgd-20(restarts=2,restarts=3)", "twice"),
        ("features-5(psnr=-1)", "must not be negative"),
    ],
)
def test_wrong_names_are_refused(text, said):
    with pytest.raises(UserError, match=said):
        read_attack_name(text)


@pytest.mark.parametrize("text", ["fgsm,,pgd-20", ",", "fgsm,"])
def test_empty_names_are_refused(text):
    with pytest.raises(UserError, match="empty name"):
        split_attack_list(text)


@pytest.mark.parametrize(
    ("text", "norm", "said"),
    [
        ("pgd-5(random_start=false,noise=0.1)", "linf", "a search has one start"),
        ("pgd-5(random_start=false,restarts=3)", "linf", "all 3 restarts of pgd would be the same"),
        ("apgd-ce(rho=0.5)", "l1", "rho and momentum have no effect in L1"),
        ("apgd-t(momentum=0.5)", "l1", "rho and momentum have no effect in L1"),
        ("pna-patchout(patchout=false,share=0.5)", "linf", "has no effect without PatchOut"),
        ("mifpe-5(keeping=1.5)", "linf", "from 0 to 1, got 1.5"),
        ("mifpe-5(gap=100)", "linf", "at most 80"),
        ("mi-fgsm-2(decay=11)", "linf", "from 0 to 10, got 11"),
        ("diverse-2(decay=11)", "linf", "from 0 to 10, got 11"),
        ("pna-patchout-2(decay=11)", "linf", "from 0 to 10, got 11"),
        ("self-ensemble-2(decay=11)", "linf", "from 0 to 10, got 11"),
        ("patch-fool(decay=1.1)", "linf", "from 0 to 1, got 1.1"),
        ("fab-2(eta=0.1)", "linf", "from 1 to 10, got 0.1; the paper has 1.05"),
        ("fab-t-2(eta=11)", "linf", "from 1 to 10, got 11"),
        ("fab-2(alpha_max=7)", "linf", "alpha_max of FAB must be from 0 to 1, got 7"),
        ("fab-2(beta=7)", "linf", "beta of FAB must be from 0 to 1, got 7"),
        ("gama-2(until=7)", "linf", "at most 1, got 7; the paper has 0.25"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(text, norm, said):
    with pytest.raises(UserError, match=said):
        make(text, norm=norm, eps=0.1)


def test_settings_reach_what_they_are_about():
    """One value each that is not the default."""
    assert make("cw-5(kappa=3)").goal.loss.keywords == {"kappa": 3}
    assert not make("mi-fgsm-5(stop_when_fooled=false)").stop_when_fooled
    assert make("mifpe-5(keeping=0.5)").stepper.keeping == 0.5
    assert make("diverse-5(scale=0.5)").scale == 0.5
    assert make("patches-learned(gradient_length=2)").gradient_length == 2
    fool = make("patch-fool(decay=0.5,every=3,layer=1,restarts=2)")
    assert isinstance(fool, Restarts)
    assert (fool.attack.decay, fool.attack.every, fool.attack.layer) == (0.5, 3, 1)


@pytest.mark.parametrize("text", ["mi-fgsm-2(decay=10)", "fab-2(eta=1,beta=1)", "gama-2(until=1)", "pgd-1000000"])
def test_the_ends_of_ranges_are_allowed(text):
    assert make(text).passes()[0] >= 2


def test_no_steps_are_refused():
    with pytest.raises(UserError, match="at least 1 step"):
        make("pgd-0")
