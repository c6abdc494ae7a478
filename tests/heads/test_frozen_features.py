"""Class and patch tokens for heads, against timm's own ways to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier, wrap
from vitadel.errors import UserError
from vitadel.heads.frozen_features import feature_width, token_features
from vitadel.instrument import extra_tokens, hooked
from vitadel.instrument.hooks import Edge
from vits import VITS, make_vit, pixels, precise_vit

TOKENED = [name for name, tiny in VITS.items() if tiny.family in ("vit", "eva", "beit")]
BY_CLASS_TOKEN = [name for name in TOKENED if name not in ("deit_distilled", "siglip", "beit", "eva02")]
ABLE = [name for name in TOKENED if name != "beit"]


def extra(count: int = 3) -> Tensor:
    return torch.randn(count, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


class TokenClassifier(nn.Module):
    """Keeps its tokens to itself: they are there during its own forward only."""

    def __init__(self, model: nn.Module, tokens: Tensor, placement: str = "prefix") -> None:
        super().__init__()
        self.model, self.tokens, self.placement = model, tokens, placement

    def forward(self, x: Tensor) -> Tensor:
        with extra_tokens(self.model, self.tokens, placement=self.placement):
            return self.model(x)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", BY_CLASS_TOKEN)
def test_the_last_blocks_are_those_of_timm(name: str) -> None:
    model, x = precise_vit(name)
    net: Any = model
    expected = net.forward_intermediates(
        x, indices=2, norm=True, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
    )
    found = token_features(model, x, blocks=2)
    assert len(found) == 2
    for (class_token, patches), (timm_patches, timm_prefix) in zip(found, expected, strict=True):
        same(class_token, timm_prefix[:, 0])
        same(patches, timm_patches)
    same(token_features(model, x)[0].class_token, found[1].class_token)
    assert (found[0].class_token - found[1].class_token).abs().max() > 1e-2
    assert found[1].patch_tokens.shape == (2, 16, feature_width(model))


@pytest.mark.parametrize("name", [name for name in TOKENED if name not in ("deit_distilled", "dinov3")])
def test_the_class_token_is_what_the_head_takes(name: str) -> None:
    """Not so for DINOv3, whose class token timm's head passes over."""
    model, x = precise_vit(name)
    net: Any = model
    same(net.head(token_features(model, x)[0].class_token), model(x))
    if name in ABLE:
        with extra_tokens(model, extra()):
            same(net.head(token_features(model, x)[0].class_token), model(x))


def test_two_class_tokens_are_averaged_and_no_patches() -> None:
    model, x = precise_vit("deit_distilled")
    net: Any = model
    tokens = net.forward_features(x)
    (found,) = token_features(model, x)
    same(found.class_token, (tokens[:, 0] + tokens[:, 1]) / 2)
    same(found.patch_tokens, tokens[:, 2:])


def test_the_norm_after_pooling_is_the_final_norm() -> None:
    model, x = precise_vit("vit", global_pool="avg")
    net: Any = model
    assert isinstance(net.norm, nn.Identity)
    raw = net.blocks(net._pos_embed(net.patch_embed(x)))
    (found,) = token_features(model, x)
    same(found.class_token, net.fc_norm(raw[:, 1:].mean(1)))
    same(found.patch_tokens, net.fc_norm(raw[:, 1:]))


@pytest.mark.parametrize("name", ABLE)
def test_extra_tokens_act_and_are_left_out(name: str) -> None:
    model, x = precise_vit(name)
    net: Any = model
    with extra_tokens(model, extra()):
        tokens = net.forward_features(x)
        around = token_features(model, x, blocks=2)
    inside = token_features(TokenClassifier(model, extra()), x, blocks=2)
    plain = token_features(model, x, blocks=2)
    for found in (around, inside):
        patches = tokens[:, VITS[name].prefix :]
        same(found[1].patch_tokens, net.fc_norm(patches) if isinstance(net.norm, nn.Identity) else patches)
        if name in BY_CLASS_TOKEN:
            same(found[1].class_token, tokens[:, 0])
        for block in range(2):
            same(found[block].patch_tokens, inside[block].patch_tokens)
            assert (found[block].patch_tokens - plain[block].patch_tokens).abs().max() > 1e-4


@pytest.mark.parametrize("placement", ["prefix", "append"])
def test_earlier_blocks_with_extra_tokens_by_hand(placement: str) -> None:
    model, x = precise_vit("dinov2_registers")
    net: Any = model
    stream = net.norm_pre(net._pos_embed(net.patch_embed(x)))
    stream = net.blocks[0](torch.cat([stream, extra().expand(2, -1, -1)], dim=1))
    expected = net.norm(stream[:, :-3])
    with extra_tokens(model, extra(), placement=placement):
        around = token_features(model, x, blocks=2)[0]
    for first in (around, token_features(TokenClassifier(model, extra(), placement), x, blocks=2)[0]):
        same(first.class_token, expected[:, 0])
        same(first.patch_tokens, expected[:, 5:])


def test_attention_factors_hold_for_pooling_too() -> None:
    """They are set inside the classifier's pass, where a pooling attention is one of those scaled."""
    model = wrap(make_vit("siglip"), mean=(0.5,) * 3, std=(0.5,) * 3)
    model.set_attention_factors([1.0, 1.0, 0.2])
    x = pixels("siglip")
    head: Any = model.backbone.head
    torch.testing.assert_close(head(token_features(model, x)[0].class_token), model(x), rtol=0, atol=1e-6)


def test_pixels_are_normalized_as_the_classifier_does() -> None:
    net, x = make_vit("vit"), pixels("vit")
    model = Classifier(net, wrap(net, mean=(0.4,) * 3, std=(0.3,) * 3).record)
    expected = token_features(net, (x - 0.4) / 0.3)[0]
    torch.testing.assert_close(token_features(model, x)[0], expected)


def test_gradients_reach_pixels_and_half_precision_is_widened() -> None:
    model, x = make_vit("vit"), pixels("vit").requires_grad_()
    (found,) = token_features(model, x)
    (grad,) = torch.autograd.grad(found.patch_tokens.sum() + found.class_token.square().sum(), x)
    assert grad.abs().sum() > 0
    (found,) = token_features(model.bfloat16(), x.detach().bfloat16())
    assert found.class_token.dtype == found.patch_tokens.dtype == torch.float32


def test_nothing_stays_on_the_model() -> None:
    model, x = make_vit("vit"), pixels("vit")
    before = model(x)
    token_features(model, x, blocks=2)
    assert torch.equal(model(x), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_hooks_on_the_norm_see_the_models_pass_only() -> None:
    model, x = make_vit("vit"), pixels("vit")
    net: Any = model
    seen: list[int] = []
    with hooked(model, [Edge("norm", net.norm, lambda tokens: seen.append(tokens.shape[1]))]):
        token_features(model, x, blocks=2)
    assert seen == [17]


@pytest.mark.parametrize("name", [name for name in VITS if name not in TOKENED])
def test_families_without_tokens_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"family '{VITS[name].family}'.*vit, eva, beit"):
        token_features(make_vit(name), pixels(name))


@pytest.mark.parametrize("blocks", [0, 3])
def test_wrong_numbers_of_blocks_are_refused(blocks: int) -> None:
    with pytest.raises(UserError, match=f"last {blocks} blocks.*has 2"):
        token_features(make_vit("vit"), pixels("vit"), blocks)


def test_without_pooling_a_normed_class_token_is_needed() -> None:
    model, x = precise_vit("vit", global_pool="")
    net: Any = model
    same(token_features(model, x)[0].class_token, net.forward_features(x)[:, 0])
    with pytest.raises(UserError, match="without pooling"):
        token_features(make_vit("vit", global_pool="", fc_norm=True), pixels("vit"))
