"""The attacks that look inside a model, and the checks of attention, on models of transformers and torchvision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitadel
from other_vits import CLASSES, OTHERS, make_other, pixels_for
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.attacks import make
from vitadel.attacks.parse import needs_known_family
from vitadel.attacks.registry import ATTACKS, PREFIXES
from vitadel.attacks.threats import make_threat
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import rules_of
from vitadel.instrument.attention import score_statistics
from vitadel.instrument.tokens import token_width
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated

SHORT = {
    "patches-random": "patches-random(masks=2)",
    "patches-learned": "patches-learned(masks=2,images=4,training_steps=5)",
}
AROUND = {"aas": "aas(images=4,steps=2)", "aas-bpda": "aas-bpda(images=4,steps=2)", "aas-paper": "aas-paper(images=4)"}
AROUND |= {"scale": "scale:0.1"}
INSIDE = [SHORT.get(name, f"{name}-2") for name in ATTACKS if needs_known_family(name)]
INSIDE += [f"{AROUND[name]}+pgd-2" for name, entry in PREFIXES.items() if entry.needs_vit]
EPS = 8 / 255


@pytest.fixture(scope="module", params=OTHERS)
def opened(request) -> tuple[str, Classifier, Tensor, Tensor]:
    """Name, model, pixels and labels, one of them wrong from the start."""
    model, x = vitadel.wrap(make_other(request.param)), pixels_for(3)
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    return request.param, model, x, y


def ready(name: str, model: nn.Module) -> Attack:
    attack = make(name, eps=EPS)
    if isinstance(attack, Calibrated):
        attack = attack.prepared(model, [(pixels_for(4), torch.arange(4) % CLASSES)])
    return attack


def traces(model: nn.Module) -> list[object]:
    """What an attack must leave as it is: modes, attributes, flags and hooks."""
    found: list[object] = [parameter.requires_grad for parameter in model.parameters()]
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        found.append((module.training, list(vars(module)), [len(each) for each in hooks]))
    return found


def test_all_attacks_that_look_inside_are_met():
    assert len(INSIDE) == 10


def test_no_images_have_no_logits(opened):
    _, model, x, _ = opened
    with torch.no_grad():
        assert model(x[:0]).shape == (0, CLASSES)


@pytest.mark.slow
def test_attacks_obey_their_rules_and_leave_no_trace(opened):
    which, model, x, y = opened
    before, weights = traces(model), [each.clone() for each in model.parameters()]
    for name in INSIDE:
        if name.startswith("patch-fool") and OTHERS[which].windows:
            with pytest.raises(UserError, match="attention between patches"):
                ready(name, model)(model, x, y)
            continue
        attack = ready(name, model)
        rules = rules_of(attack)
        threat = make_threat("linf", EPS) if rules is None else rules(model, x)
        rng = SampleRNG.of_samples(0, range(3))
        z = attack(model, x, y, rng)
        assert z.shape == x.shape, name
        assert not z.requires_grad, name
        assert float(z.min()) >= 0, name
        assert float(z.max()) <= 1, name
        assert float((threat.size(z, x) - threat.eps).max()) <= 1e-6, name
        assert float((z - x).abs().max()) > 0, name
        alone = attack(model, x[1:2], y[1:2], rng[torch.tensor([1])])
        assert torch.allclose(alone, z[1:2], atol=1e-5), name
        assert traces(model) == before, name
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


@pytest.mark.slow
def test_tokens_of_a_token_classifier_act_where_they_have_a_place(opened):
    which, model, x, _ = opened
    if not OTHERS[which].takes_tokens:
        with pytest.raises(UserError):
            token_width(model)
        return
    tokens = fresh_tokens(token_width(model), 2, 1.0, 0)
    with torch.no_grad():
        changed = TokenClassifier(model, tokens.to(x.dtype))(x)
        assert (changed - model(x)).abs().max() > 1e-4
    assert changed.shape == (3, CLASSES)


def test_gaps_between_scores_are_those_of_the_attention_maps(opened):
    """What the diagnosis of attention reads: log p - log q of the two largest probabilities is their scores' gap."""
    which, model, x, _ = opened
    with torch.no_grad(), vitadel.attention_maps(model) as maps, score_statistics(model) as gaps:
        model(x)
        largest = [each.topk(2, dim=-1).values.log() for each in maps]
    assert [each.shape[1] for each in maps] == list(OTHERS[which].heads)
    for found, two in zip(gaps, largest, strict=True):
        expected = (two[..., 0] - two[..., 1]).flatten().sort().values
        assert torch.allclose(found.flatten().sort().values.double(), expected.double(), atol=1e-6)
