"""Scaled blocks: which sets there are, and that a set is what `aas+` would do with those factors."""

from __future__ import annotations

import pytest
import torch

from vitadel.attacks.attention_scaling.aas import Rescaled
from vitadel.attacks.goals import clearly_fooled
from vitadel.attacks.parse import make
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.scale_factors import ThroughScaled
from vitadel.studies.scaled_blocks import ScaledBlocksRequest, block_sets, factors_within
from vits import make_vit, pixels


def test_sets_of_blocks() -> None:
    assert block_sets(3, "first") == [(k, frozenset(range(k))) for k in range(4)]
    assert block_sets(3, "last") == [(k, frozenset(range(3 - k, 3))) for k in range(4)]
    assert block_sets(3, "single") == [(k + 1, frozenset({k})) for k in range(3)]
    assert [k for k, _ in block_sets(5, "first", 2)] == [0, 2, 4, 5]
    assert block_sets(5, "last", 9) == [(0, frozenset()), (5, frozenset(range(5)))]
    assert factors_within((0.1, 0.2, 0.3), frozenset({0, 2})) == (0.1, 1.0, 0.3)


def test_together_with_the_plain_attack_it_is_the_whole_of_aas() -> None:
    model, x = make_vit("vit"), pixels("vit", batch=6)
    with torch.no_grad():
        y = model(x).argmax(1)
    search, factors, rng = make("pgd-2", eps=4 / 255), (0.3, 1.0), SampleRNG.of_samples(0, range(6))
    z = ThroughScaled(search, factors)(model, x, y, rng)
    plain = search(model, x, y, rng)
    whole, _ = Rescaled(search, factors).run_with_info(model, x, y, rng)
    with torch.no_grad():
        fooled = clearly_fooled(model(z), y) | clearly_fooled(model(plain), y)
        assert clearly_fooled(model(whole), y).tolist() == fooled.tolist()


def test_with_nothing_scaled_it_is_the_plain_attack_again() -> None:
    model, x = make_vit("vit"), pixels("vit", batch=2)
    y, rng = torch.zeros(2, dtype=torch.int64), SampleRNG.of_samples(0, range(2))
    search = make("pgd-2", eps=4 / 255)
    z = ThroughScaled(search, (1.0, 1.0))(model, x, y, rng)
    assert torch.equal(z, search(model, x, y, rng.stream("rescaled")))


def test_user_errors() -> None:
    with pytest.raises(UserError, match=r"unknown way 'frist'.*did you mean first"):
        ScaledBlocksRequest(ways=("frist",))
    with pytest.raises(UserError, match="at least 1"):
        ScaledBlocksRequest(every=0)
    with pytest.raises(UserError, match="plain attack"):
        ScaledBlocksRequest(attack="patch-fool")
