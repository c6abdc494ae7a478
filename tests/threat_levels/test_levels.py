"""The attacks of each level, on models that are not the victim's unless the level says so."""

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
from vitadel.threat_levels.levels import LEVELS, AttackerAssets, MeanOf, check_levels, level_attacks
from vitadel.threat_levels.request import ThreatLevelsRequest
from vits import make_vit, pixels


@pytest.fixture(scope="module")
def assets():
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


def made(assets, levels=tuple(LEVELS)):
    return level_attacks(levels, assets, 7, 50, ("apgd-ce", "pgd-7"))


def test_every_level_has_an_attack_and_every_attack_a_name_of_its_own(assets):
    found = made(assets)
    assert {attack.level for attack in found} == set(LEVELS)
    assert len({attack.title for attack in found}) == len(found)
    request = list(LEVELS)
    assert [request.index(attack.level) for attack in found] == sorted(request.index(attack.level) for attack in found)


def test_attacks_on_the_public_backbone_do_not_see_the_tokens_and_run_to_the_end(assets):
    found = level_attacks(("T2", "T6"), assets, 7, 50, (), ("apgd-ce", "pgd-7"))
    public = [attack for attack in found if attack.name.endswith(", public")]
    assert [attack.name for attack in public] == ["apgd-ce, public", "pgd-7, public"]
    for attack in public:
        assert attack.level == "T2"
        assert assets.victim not in set(attack.source.modules())
        assert attack.all_images
        assert not attack.attack(2 / 255).stop_when_fooled


def test_only_those_who_know_the_tokens_attack_the_victim(assets):
    for attack in made(assets):
        parts = set(attack.source.modules())
        assert (assets.victim in parts) == (attack.level in ("T5", "T6", "T8")), attack.title
        assert attack.source is not assets.victim or attack.queries_victim or attack.features


def test_attackers_who_cannot_query_run_all_steps(assets):
    for each in made(assets):
        attack = each.attack(2 / 255)
        if isinstance(attack, PGD):
            assert attack.stop_when_fooled == each.queries_victim
        if isinstance(attack, FeatureAttack):
            assert not attack.stop_when_fooled


def test_attackers_who_see_verdicts_query_the_victim(assets):
    assert all(attack.queries_victim == (attack.level in ("T5", "T6")) for attack in made(assets))


def test_the_attack_made_to_transfer_has_over_a_hundred_steps_by_default(assets):
    tuned = next(attack for attack in level_attacks(("T2+",), assets, ThreatLevelsRequest.steps, 50, ()))
    assert tuned.name == "diverse-120 beside random tokens"
    assert tuned.attack(1 / 255).steps == 120


@pytest.mark.parametrize("kind", ["tokens", "pooled"])
def test_feature_attacks_go_for_the_features_that_the_defence_compares(assets, kind):
    found = [attack for attack in made(replace(assets, features=kind)) if attack.features and attack.level != "T0"]
    assert [attack.level for attack in found] == ["T2", "T2", "T6"]
    goals = [attack.attack(2 / 255).goal for attack in found]
    assert {goal.kind for goal in goals} == {kind}
    assert [goal.axis for goal in goals] == ["token", "token" if kind == "pooled" else "channel", "token"]
    assert all(attack.name.endswith("pooled") == (kind == "pooled") for attack in found)


def test_levels_without_means_are_left_out(assets):
    bare = AttackerAssets(assets.victim)
    assert {attack.level for attack in made(bare)} == {"T0", "T2", "T2+", "T5", "T6"}
    assert [attack.name for attack in made(bare, ("T6",))] == ["features-7", "pgd-7", "apgd-ce"]


def test_several_surrogates_are_averaged_with_the_bare_backbone(assets):
    x = pixels("vit")
    both = [attack for attack in made(assets) if attack.level == "T4"][-1]
    with torch.no_grad():
        logits = [model(x) for model in (assets.victim.classifier, *assets.surrogates)]
        torch.testing.assert_close(both.source(x), sum(logits) / 3)
        torch.testing.assert_close(MeanOf(assets.surrogates)(x), sum(logits[1:]) / 2)


def test_unknown_levels_are_reported():
    assert check_levels(["T6", "T2"]) == ("T2", "T6")
    with pytest.raises(UserError, match=r"unknown threat level 'T9'.*Known: T0, T1, T2, T2\+"):
        check_levels(["T9"])
