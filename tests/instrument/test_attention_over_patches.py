"""The last attention over patches, against attention computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.errors import UserError
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.tokens import extra_tokens
from vits import make_vit, pixels


@torch.no_grad()
def last_maps(model: nn.Module, x: Tensor, extra: Tensor, at: int) -> Tensor:
    """A plain ViT of two blocks by hand, with `extra` tokens inserted `at` a place: (n, tokens, tokens), over heads."""
    tokens: Tensor = model.norm_pre(model.pos_drop(model._pos_embed(model.patch_embed(x))))  # type: ignore[operator]
    tokens = torch.cat((tokens[:, :at], extra.expand(len(x), -1, -1), tokens[:, at:]), 1)
    first, last = model.blocks  # type: ignore[misc]
    q, k, _ = last.attn.qkv(last.norm1(first(tokens))).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(2, 3) / math.sqrt(8)).softmax(-1).mean(1)


def test_attention_is_the_class_tokens_in_the_last_block():
    model, x, z = make_vit("vit"), pixels("vit"), pixels("vit", seed=2)
    for shown in (x, z):
        seen = attention_over_patches(model, shown)
        expected = last_maps(model, shown, torch.zeros(1, 0, 24), 1)[:, 0, 1:]
        expected = (expected / expected.sum(1, keepdim=True)).view(2, 4, 4)
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=1e-5)
        assert seen.sum((1, 2)).tolist() == pytest.approx([1, 1], abs=1e-6)


@pytest.mark.parametrize(("placement", "at"), [("prefix", 1), ("append", 17)])
def test_attention_leaves_extra_tokens_out(placement, at):
    model, x = make_vit("vit"), pixels("vit")
    extra = torch.randn(1, 3, 24, generator=torch.Generator().manual_seed(0))
    with extra_tokens(model, extra[0], placement=placement):
        seen = attention_over_patches(model, x)
    own = [place for place in range(20) if not at <= place < at + 3][1:]
    expected = last_maps(model, x, extra, at)[:, 0][:, own]
    torch.testing.assert_close(seen.flatten(1), expected / expected.sum(1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_without_a_class_token_the_mean_over_patch_queries_counts():
    model, x = make_vit("vit", class_token=False, global_pool="avg"), pixels("vit")
    expected = last_maps(model, x, torch.zeros(1, 0, 24), 0).mean(1)
    torch.testing.assert_close(attention_over_patches(model, x).flatten(1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "grid"),
    [("dinov2_registers", 4), ("siglip", 4), ("cait", 4), ("xcit", 4), ("fan", 4), ("pit", 4), ("rvt", 2), ("swin", 4)],
)
def test_attention_is_over_the_grid_that_the_last_layer_has(name, grid):
    seen = attention_over_patches(make_vit(name), pixels(name))
    assert seen.shape == (2, grid, grid)
    assert (seen >= 0).all()
    assert seen.sum((1, 2)).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_models_without_maps_over_patches_are_refused():
    with pytest.raises(UserError, match="no anatomy known"):
        attention_over_patches(TinyNet(), images(2))
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="over windows"):
        attention_over_patches(make_vit("swin", img_size=64), x)  # its last layer has four
