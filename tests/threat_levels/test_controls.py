"""Controls change as little as they say."""

from __future__ import annotations

import torch

from toys import images
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.backbones.classifier import wrap
from vitadel.instrument import extra_tokens
from vitadel.threat_levels.controls import Resized, add_weight_noise, untrained_controls
from vits import make_vit


def victim_of(seed=11):
    return TokenClassifier(wrap(make_vit("vit")), fresh_tokens(24, 3, 0.5, seed)).eval()


def test_every_control_is_what_it_is_called():
    victim, x = victim_of(), images(4, side=32)
    found = untrained_controls(victim, lambda model: model, seed=2)
    with torch.no_grad():
        answers = {name: model(x) for name, model in found.items()}
        assert torch.equal(answers["no tokens"], victim.classifier(x))
        with extra_tokens(victim.classifier, torch.zeros(3, 24)):
            assert torch.equal(answers["zero tokens"], victim.classifier(x))
        with extra_tokens(victim.classifier, fresh_tokens(24, 3, seed=2)):
            assert torch.equal(answers["untrained tokens"], victim.classifier(x))
    names = list(answers)
    assert not any(torch.equal(answers[a], answers[b]) for a in names for b in names if a < b)


def test_weights_of_a_copy_move_by_one_percent():
    classifier = wrap(make_vit("vit"))
    before = {name: value.clone() for name, value in classifier.state_dict().items()}
    changed = add_weight_noise(classifier, 0.01, seed=3)
    assert all(torch.equal(before[name], value) for name, value in classifier.state_dict().items())
    moved = [
        ((new - old) / old).flatten()
        for (name, old), new in zip(before.items(), changed.state_dict().values(), strict=True)
        if old.dim() > 1 and bool((old != 0).all()) and "weight" in name
    ]
    spread = torch.cat(moved)
    assert abs(float(spread.std()) - 0.01) < 5e-4
    assert abs(float(spread.mean())) < 5e-4


def test_a_resize_there_and_back_keeps_plain_surfaces_and_blurs_edges():
    seen = []
    model = torch.nn.Identity()
    model.forward = lambda x: seen.append(x) or x
    plain, edge = torch.full((1, 3, 32, 32), 0.3), torch.zeros(1, 3, 32, 32)
    edge[..., 16:] = 1
    Resized(model)(plain), Resized(model)(edge)
    assert torch.allclose(seen[0], plain, atol=1e-6)
    assert 0 < (seen[1] - edge).abs().max() < 0.6
    assert seen[1].shape == edge.shape
