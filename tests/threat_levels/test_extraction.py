"""Secret tokens are found again from what the victim answers, without reading them."""

from __future__ import annotations

import pytest
import torch

from toys import images
from vitadel.adapters.tokens.token_classifier import TokenClassifier, fresh_tokens
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.threat_levels.extraction import extract_tokens


@pytest.fixture(scope="module")
def victim():
    classifier = load_model("zoo:shapes-standard")
    return TokenClassifier(classifier, fresh_tokens(96, 10, seed=11)).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("exposed", "left"), [("features", 0.2), ("scores", 0.4)])
def test_the_fit_answers_as_the_victim_does(victim, exposed, left):
    before = victim.tokens.detach().clone()
    found = extract_tokens(victim, images(36, seed=3, side=32).split(12), exposed, steps=60, seed=5)
    assert found.queries == 24
    assert 1 - found.cosine < left * (1 - found.cosine_before)
    x = images(8, seed=4, side=32)
    with torch.no_grad():
        start = TokenClassifier(victim.classifier, fresh_tokens(96, 10, seed=5))(x)
        far, near = ((each - victim(x)).abs().max() for each in (start, found.model(x)))
    assert near < 2 * left * far
    assert torch.equal(victim.tokens, before)
    assert not found.model.tokens.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize(("held", "count"), [(3, 10), (10, 4)])
def test_a_guessed_number_elsewhere_is_fitted_without_looking_at_the_victim(victim, held, count):
    """The fit neither takes the number nor the place from the victim, and still moves towards its answers."""
    other = TokenClassifier(victim.classifier, fresh_tokens(96, held, seed=12), placement="append").eval()
    found = extract_tokens(other, images(24, seed=3, side=32).split(12), count=count, steps=40, seed=5)
    assert found.model.tokens.shape == (count, 96)
    assert found.model.placement == "prefix"
    assert 1 - found.cosine < 0.6 * (1 - found.cosine_before)


def test_what_it_needs_is_reported(victim):
    x = images(8, side=32)
    with pytest.raises(UserError, match="features or scores, got 'labels'"):
        extract_tokens(victim, x.split(4), "labels")
    with pytest.raises(UserError, match="at least two batches"):
        extract_tokens(victim, [x])
