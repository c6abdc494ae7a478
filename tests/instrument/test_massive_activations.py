"""Massive activations: planted ones must be found where they were planted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from vitadel.backbones.anatomy import blocks_of
from vitadel.errors import UserError
from vitadel.instrument import block_features, extra_tokens, hooked
from vitadel.instrument.hooks import Edge
from vitadel.instrument.massive_activations import CLASS, EXTRA, REGISTER, massive_activations, quartiles
from vits import VITS, make_vit, pixels

HUGE = {0: (1000.0, 9, 3), 1: (-2000.0, 12, 20)}
"""Value, token and channel, per image."""


def planting(places: dict[int, tuple[float, int, int]]) -> Callable[[Tensor], Tensor]:
    def plant(stream: Tensor) -> Tensor:
        stream = stream.clone()
        for image, (value, token, channel) in places.items():
            stream[image, token, channel] = value
        return stream

    return plant


def test_planted_values_are_found_in_their_layer() -> None:
    model, x = make_vit("vit"), pixels("vit")
    last = blocks_of(model)[1]
    with hooked(model, [Edge(last.name, last.module, planting(HUGE))]):
        found = massive_activations(model, x)
    assert found.layers == ("input of blocks.0", "blocks.0", "blocks.1")
    assert found.values.shape == found.tokens.shape == found.channels.shape == (3, 2)
    assert found.values[2].tolist() == [1000.0, 2000.0]
    assert found.tokens[2].tolist() == [9, 12]
    assert found.channels[2].tolist() == [3, 20]
    assert found.values[:2].max() < 100


def test_planted_in_the_input_of_the_first_block() -> None:
    model, x = make_vit("vit"), pixels("vit")
    first = blocks_of(model)[0]
    with hooked(model, [Edge(first.name, first.module, planting(HUGE), before=True)]):
        found = massive_activations(model, x)
    assert found.values[0].tolist() == [1000.0, 2000.0]
    assert found.tokens[0].tolist() == [9, 12]


@pytest.mark.parametrize("name", list(VITS))
def test_every_layer_of_every_family_by_hand(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    with torch.no_grad(), block_features(model) as features:
        model(x)
    found = massive_activations(model, x, excluded=())
    assert len(found.layers) == VITS[name].blocks + 1
    for layer, output in enumerate(features, start=1):
        # Two passes of one model may differ in the last bit, by where the allocator puts their tensors.
        assert_close(found.values[layer], output.abs().flatten(1).amax(1), rtol=1e-6, atol=0)
        if output.dim() == 3:
            for image in range(2):
                place = int(found.tokens[layer, image]), int(found.channels[layer, image])
                assert_close(output[image][place].abs(), found.values[layer, image], rtol=1e-6, atol=0)


@pytest.mark.parametrize(("token", "counts"), [(0, True), (1, False), (4, False), (5, True)])
def test_registers_do_not_count(token: int, counts: bool) -> None:
    model, x = make_vit("dinov2_registers"), pixels("dinov2_registers")
    last = blocks_of(model)[1]
    with hooked(model, [Edge(last.name, last.module, planting({0: (500.0, token, 7)}))]):
        value = massive_activations(model, x).values[2, 0].item()
        all_count = massive_activations(model, x, excluded=()).values[2, 0].item()
    assert (value == 500.0) is counts
    assert all_count == 500.0


class TokenClassifier(nn.Module):
    """Keeps its tokens to itself: they are there during its own forward only."""

    def __init__(self, model: nn.Module, tokens: Tensor, placement: str) -> None:
        super().__init__()
        self.model, self.tokens, self.placement = model, tokens, placement

    def forward(self, x: Tensor) -> Tensor:
        with extra_tokens(self.model, self.tokens, placement=self.placement):
            return self.model(x)


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        *((name, "prefix") for name in ("vit", "dinov2_registers", "dinov3", "siglip")),
        *((name, "append") for name in ("vit", "dinov2_registers", "siglip")),
    ],
)
def test_extra_tokens_do_not_count(name: str, placement: str) -> None:
    plain, x, prefix = make_vit(name), pixels(name), VITS[name].prefix
    huge = torch.full((2, 24), 700.0)
    huge[:, ::2] *= -1  # a constant token would have no direction after a norm
    first = prefix if placement == "prefix" else prefix + 16
    registers = range(1, prefix)
    before = massive_activations(plain, x)
    moved = torch.where(before.tokens[0] < first, before.tokens[0], before.tokens[0] + 2)
    with extra_tokens(plain, huge, placement=placement):
        around = massive_activations(plain, x)
    model = TokenClassifier(plain, huge, placement)
    inside = massive_activations(model, x)
    everything = massive_activations(model, x, excluded=())
    by_number = massive_activations(model, x, excluded=[*registers, first, first + 1])
    assert everything.values[0].tolist() == [700.0, 700.0]
    assert set(everything.tokens[0].tolist()) <= {first, first + 1}
    for found in (around, inside):
        assert found.values.max() < 100
        assert torch.equal(found.values, by_number.values)
        assert torch.equal(found.tokens, by_number.tokens)
        assert torch.equal(found.values[0], before.values[0])
        assert torch.equal(found.tokens[0], moved)


def test_explicit_exclusion_takes_the_next_largest() -> None:
    model, x = make_vit("vit"), pixels("vit")
    last = blocks_of(model)[1]
    places = {0: (1000.0, 9, 3), 1: (300.0, 0, 0)}
    with hooked(model, [Edge(last.name, last.module, planting(places))]):
        found = massive_activations(model, x, excluded=[9])
    assert found.values[2, 0] < 100
    assert found.tokens[2, 0] != 9
    assert found.values[2, 1] == 300.0


def test_the_model_is_left_as_it_was() -> None:
    model, x = make_vit("vit").train(), pixels("vit")
    massive_activations(model, x)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("excluded", "message"), [([17], "no token 17.*has 17"), (range(17), "all 17 tokens")])
def test_wrong_exclusions_are_refused(excluded: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        massive_activations(make_vit("vit"), pixels("vit"), excluded)


def test_quartiles() -> None:
    values = torch.stack([torch.arange(101.0), torch.arange(101.0) * 2])[:, torch.randperm(101)]
    assert quartiles(values).tolist() == [[25.0, 50.0], [50.0, 100.0], [75.0, 150.0]]
    assert quartiles(torch.tensor([1.0, 2.0])).tolist() == [1.25, 1.5, 1.75]
    with pytest.raises(UserError, match="at least one image"):
        quartiles(torch.empty(3, 0))


def test_tokens_by_what_they_are() -> None:
    model, x = make_vit("dinov2_registers"), pixels("dinov2_registers")
    last, tokens = blocks_of(model)[1], torch.randn(2, 24)
    for placement, token, expected in [
        ("prefix", 0, CLASS),
        ("prefix", 1, REGISTER),
        ("prefix", 4, REGISTER),
        ("prefix", 5, EXTRA),
        ("prefix", 6, EXTRA),
        ("prefix", 7, 0),
        ("prefix", 22, 15),
        ("append", 5, 0),
        ("append", 20, 15),
        ("append", 21, EXTRA),
    ]:
        plant = Edge(last.name, last.module, planting({0: (900.0, token, 2)}))
        with extra_tokens(model, tokens, placement=placement), hooked(model, [plant]):
            found = massive_activations(model, x, excluded=())
        assert (int(found.tokens[2, 0]), int(found.patches[2, 0])) == (token, expected), (placement, token)


@pytest.mark.parametrize(("name", "count"), [("cait", 1), ("xcit", 17)])
def test_class_attention_puts_its_token_first(name: str, count: int) -> None:
    model, x = make_vit(name), pixels(name)
    last = blocks_of(model)[-1]
    for token in {0, count - 1}:
        with hooked(model, [Edge(last.name, last.module, planting({0: (900.0, token, 2)}))]):
            assert int(massive_activations(model, x).patches[-1, 0]) == (CLASS if token == 0 else token - 1)
