"""Who climbs what: every level with its means, on models that are not the victim's unless the level says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks.features import FeatureAttack
from vitadel.attacks.pgd import PGD
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.threat_levels.levels import LEVELS, AttackerAssets, MeanOf, check_levels, rungs
from vitadel.threat_levels.request import ThreatLevelsRequest
from vits import make_vit, pixels


@pytest.fixture(scope="module")
def arms():
    classifier = wrap(make_vit("vit"))
    victim, *others = (TokenClassifier(classifier, fresh_tokens(24, 4, 0.5, seed)).eval() for seed in range(5))
    return AttackerAssets(
        victim,
        other=wrap(make_vit("deit3")),
        own_head=lambda model: nn.Sequential(model, nn.Identity()),
        surrogates=tuple(others[:2]),
        extracted=(("features", others[2]),),
        bank=(victim, others[3]),
    )


def made(arms, levels=tuple(LEVELS)):
    return rungs(levels, arms, 7, 50, ("apgd-ce", "pgd-7"))


def test_every_level_has_an_attack_and_every_attack_a_name_of_its_own(arms):
    found = made(arms)
    assert {rung.level for rung in found} == set(LEVELS)
    assert len({rung.title for rung in found}) == len(found)
    request = list(LEVELS)
    assert [request.index(rung.level) for rung in found] == sorted(request.index(rung.level) for rung in found)


def test_only_those_who_know_the_tokens_climb_the_victim(arms):
    for rung in made(arms):
        parts = set(rung.source.modules())
        assert (arms.victim in parts) == (rung.level in ("T5", "T6", "T8")), rung.title
        assert rung.source is not arms.victim or rung.asks or rung.features


def test_who_cannot_ask_goes_all_the_way(arms):
    for rung in made(arms):
        attack = rung.attack(2 / 255)
        if isinstance(attack, PGD):
            assert attack.stop_when_fooled == rung.asks
        if isinstance(attack, FeatureAttack):
            assert not attack.stop_when_fooled


def test_who_sees_verdicts_asks(arms):
    assert all(rung.asks == (rung.level in ("T5", "T6")) for rung in made(arms))


def test_the_attack_made_to_transfer_has_over_a_hundred_steps_by_default(arms):
    tuned = next(rung for rung in rungs(("T2+",), arms, ThreatLevelsRequest.steps, 50, ()))
    assert tuned.name == "diverse-120 beside random tokens"
    assert tuned.attack(1 / 255).steps == 120


@pytest.mark.parametrize("kind", ["tokens", "pooled"])
def test_feature_attacks_go_for_the_features_that_the_defence_compares(arms, kind):
    found = [rung for rung in made(replace(arms, features=kind)) if rung.features and rung.level != "T0"]
    assert [rung.level for rung in found] == ["T2", "T2", "T6"]
    goals = [rung.attack(2 / 255).goal for rung in found]
    assert {goal.kind for goal in goals} == {kind}
    assert [goal.axis for goal in goals] == ["token", "token" if kind == "pooled" else "channel", "token"]
    assert all(rung.name.endswith("pooled") == (kind == "pooled") for rung in found)


def test_levels_without_means_are_left_out(arms):
    bare = AttackerAssets(arms.victim)
    assert {rung.level for rung in made(bare)} == {"T0", "T2", "T2+", "T5", "T6"}
    assert [rung.name for rung in made(bare, ("T6",))] == ["features-7", "pgd-7", "apgd-ce"]


def test_several_surrogates_are_averaged_with_the_bare_backbone(arms):
    x = pixels("vit")
    both = [rung for rung in made(arms) if rung.level == "T4"][-1]
    with torch.no_grad():
        logits = [model(x) for model in (arms.victim.classifier, *arms.surrogates)]
        torch.testing.assert_close(both.source(x), sum(logits) / 3)
        torch.testing.assert_close(MeanOf(arms.surrogates)(x), sum(logits[1:]) / 2)


def test_unknown_levels_are_told():
    assert check_levels(["T6", "T2"]) == ("T2", "T6")
    with pytest.raises(UserError, match=r"unknown level 'T9'.*Known: T0, T1, T2, T2\+"):
        check_levels(["T9"])
