"""The residual stream after each block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vitadel.backbones.anatomy import blocks_of
from vitadel.errors import UserError
from vitadel.instrument import block_features, scaled_attention
from vits import VITS, make_vit, pixels, precise_vit


def test_vit_features_equal_a_forward_by_hand() -> None:
    model, x = precise_vit("dinov2_registers")
    net: Any = model
    stream = net.norm_pre(net._pos_embed(net.patch_embed(x)))
    with block_features(model) as features:
        out = model(x)
    for block, seen in zip(net.blocks, features, strict=True):
        stream = block(stream)
        torch.testing.assert_close(seen, stream, rtol=0, atol=0)
    torch.testing.assert_close(net.forward_head(net.norm(stream)), out, rtol=0, atol=0)


SHAPES = {
    "vit": [(2, 17, 24)] * 2,
    "siglip": [(2, 16, 24)] * 2,
    "dinov3": [(2, 21, 24)] * 2,
    "pit": [(2, 50, 16), (2, 17, 32), (2, 17, 32)],
    "cait": [(2, 16, 24), (2, 16, 24), (2, 1, 24), (2, 1, 24)],
    "xcit": [(2, 16, 24), (2, 16, 24), (2, 17, 24), (2, 17, 24)],
    "swin": [(2, 8, 8, 16), (2, 8, 8, 16), (2, 4, 4, 32), (2, 4, 4, 32)],
    "swinv2": [(2, 8, 8, 16), (2, 8, 8, 16), (2, 4, 4, 32), (2, 4, 4, 32)],
    "levit": [(2, 16, 64), (2, 4, 96), (2, 4, 96)],
    "fan": [(2, 16, 24), (2, 16, 24)],
    "fan_hybrid": [(2, 16, 24), (2, 16, 24)],
    "rvt": [(2, 16, 24), (2, 4, 48), (2, 4, 48)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_as_the_family_makes_them(name: str) -> None:
    model = make_vit(name)
    with block_features(model) as features:
        model(pixels(name))
    assert [tuple(seen.shape) for seen in features] == SHAPES[name]
    assert features.names == tuple(block.name for block in blocks_of(model))


@pytest.mark.parametrize("name", VITS)
def test_scaling_one_module_moves_its_block_and_none_before_it(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    factors = [1.0] * len(VITS[name].heads)
    factors[-1] = 0.2
    with torch.no_grad(), block_features(model) as features:
        model(x)
        plain = list(features)
        with scaled_attention(model, factors):
            model(x)
    same = [torch.equal(one, other) for one, other in zip(features, plain, strict=True)]
    moved = name == "siglip"  # its last attention pools after the blocks
    assert same == [True] * (len(same) - 1) + [moved]


def test_chosen_blocks_in_the_order_given() -> None:
    model, x = make_vit("cait"), pixels("cait").requires_grad_()
    with block_features(model) as everything, block_features(model, (-1, 0)) as chosen:
        model(x)
    assert len(chosen) == 2
    assert chosen[0] is everything[3]
    assert chosen[1] is everything[0]
    assert torch.autograd.grad(chosen[0].sum(), x)[0].abs().max() > 0


def test_a_block_that_is_not_there() -> None:
    message = r"no block 2, -3; the model has 2 blocks. Give numbers from -2 to 1"
    with pytest.raises(UserError, match=message), block_features(make_vit("vit"), [0, 2, -3]):
        pass
