"""Blocks nest in any order, refuse to see nothing, and leave the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from timm.layers import Attention
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, block_features, extra_tokens, frozen, scaled_attention, score_statistics
from vits import VITS, make_vit, pixels, precise_vit

every_vit = pytest.mark.parametrize("name", VITS)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "manual"])


@every_vit
def test_blocks_nest_in_any_order(name: str) -> None:
    model, x = precise_vit(name)
    with torch.no_grad():
        with attention_maps(model) as outer_maps, score_statistics(model) as outer_gaps, scaled_attention(model, 0.5):
            model(x)
        with scaled_attention(model, 0.5), attention_maps(model) as inner_maps, score_statistics(model) as inner_gaps:
            model(x)
        for outer, inner in ((outer_maps, inner_maps), (outer_gaps, inner_gaps)):
            assert all(torch.equal(one, other) for one, other in zip(outer, inner, strict=True))
        with scaled_attention(model, 0.2):
            at_once = model(x)
        with scaled_attention(model, 0.5), scaled_attention(model, 0.4):
            nested = model(x)
    torch.testing.assert_close(nested, at_once, rtol=0, atol=1e-12)


def test_blocks_may_end_out_of_order() -> None:
    model, x = make_vit("vit", True), pixels("vit")
    plain = model(x)
    first, second = attention_maps(model), scaled_attention(model, 0.5)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    scaled = model(x)
    second.__exit__(None, None, None)
    with scaled_attention(model, 0.5):
        assert torch.equal(model(x), scaled)
    assert torch.equal(model(x), plain)


def test_checkpointing_agrees_inside_the_block_and_is_refused_outside() -> None:
    model, x = make_vit("vit"), pixels("vit").requires_grad_()

    def slope(leave_first: bool) -> Tensor:
        with scaled_attention(model, 0.3):
            value = model(x).square().sum()
            if not leave_first:
                return torch.autograd.grad(value, x)[0]
        return torch.autograd.grad(value, x)[0]

    expected = slope(leave_first=True)
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    torch.testing.assert_close(slope(leave_first=False), expected)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        slope(leave_first=True)


def traces(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """Everything of a model that a block could forget to put back, weights aside."""
    for name, module in model.named_modules():
        state = {key: value for key, value in vars(module).items() if key != "attention_bias_cache"}  # LeViT's own
        hooks = {key: len(value) for key, value in state.items() if "hooks" in key and value is not None}
        plain = {key: value for key, value in state.items() if not key.startswith("_")}
        yield name, list(state), hooks, plain


def everything_on(model: nn.Module, tokens: bool) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(scaled_attention(model, 0.3))
    stack.enter_context(scaled_attention(model, 0.3, backward_only=True))
    stack.enter_context(attention_maps(model))
    stack.enter_context(score_statistics(model))
    stack.enter_context(block_features(model))
    if tokens:
        stack.enter_context(extra_tokens(model, torch.ones(2, 24)))
    stack.enter_context(frozen(model))
    return stack


class Trouble(Exception):
    pass


@pytest.mark.slow
@every_vit
@fused_or_not
@pytest.mark.parametrize("trouble", [None, "body", "attention"])
def test_no_trace_is_left(name: str, fused: bool, trouble: str | None) -> None:
    model, x = make_vit(name, fused), pixels(name)
    plain, before, weights = model(x), list(traces(model)), copy.deepcopy(model.state_dict())

    def fail(*_: Any) -> None:
        raise Trouble

    with nullcontext() if trouble is None else pytest.raises(Trouble):  # noqa: SIM117
        with everything_on(model, tokens=VITS[name].family in ("vit", "eva")):
            model(x)
            if trouble == "body":
                fail()
            if trouble == "attention":  # in the middle of its forward, while torch's calls are being met
                with attentions_of(model)[-1].module.proj.register_forward_pre_hook(fail):  # type: ignore[union-attr]
                    model(x)
    assert list(traces(model)) == before
    assert torch.equal(model(x), plain)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_an_attention_that_never_shows_its_softmax_is_refused() -> None:
    class ByHand(Attention):  # type: ignore[misc]
        def forward(self, x: Tensor, **_: Any) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
            weights = (self.scale * q @ k.transpose(-2, -1)).exp()
            out: Tensor = self.proj((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
            return out

    model: Any = make_vit("vit")
    model.blocks[1].attn = ByHand(24, num_heads=3)
    with pytest.raises(UserError, match=r"nothing was seen at 'blocks\.1\.attn'"), attention_maps(model):
        model(pixels("vit"))
    with scaled_attention(model, 0.5):
        model(pixels("vit"))
