"""Gradients that take attention maps for constants, against gradients computed without any hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from toys import TinyNet
from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, scaled_attention
from vitadel.instrument.attention import constant_attention
from vits import VITS, make_vit, pixels, precise_vit

every_vit = pytest.mark.parametrize("name", VITS)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "manual"])


class SoftmaxDetached(TorchFunctionMode):
    """Detaches whatever a softmax returns while one of the modules runs."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.inside = False
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.switch(True))
            module.register_forward_hook(lambda *_: self.switch(False))

    def switch(self, inside: bool) -> None:
        self.inside = inside

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        return out.detach() if self.inside and func in (torch.Tensor.softmax, torch.softmax, F.softmax) else out


def slope(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), x)[0]


def test_one_attention_in_closed_form() -> None:
    """With maps A held, out = Wo A Wv x + const, so the gradient of <g, out> is Wv' A' Wo' g."""
    model, _ = precise_vit("vit", True, depth=1)
    net: Any = model
    attention = net.blocks[0].attn
    tokens = torch.randn(2, 17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    g = torch.randn(2, 17, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    q, k, _ = attention.qkv(tokens).view(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    maps = (q @ k.mT / 8**0.5).softmax(-1)
    per_head = (g @ attention.proj.weight).view(2, 17, 3, 8)
    to_values = torch.einsum("bhqk,bqhd->bkhd", maps, per_head).flatten(2)
    expected = to_values @ attention.qkv.weight[48:]
    tokens.requires_grad_()
    (full,) = torch.autograd.grad((g * attention(tokens)).sum(), tokens)
    with constant_attention(model):
        (held,) = torch.autograd.grad((g * attention(tokens)).sum(), tokens)
        queries_and_keys = torch.autograd.grad((g * attention(tokens)).sum(), attention.qkv.weight)[0][:48]
    torch.testing.assert_close(held, expected, rtol=0, atol=1e-12)
    assert (queries_and_keys == 0).all()
    assert (full - expected).abs().max() > 0.1


@pytest.mark.slow
@every_vit
@fused_or_not
def test_values_stay_and_gradients_go_through_the_values_only(name: str, fused: bool) -> None:
    model, x = precise_vit(name, fused)
    plain, free = model(x), slope(model, x)
    with constant_attention(model):
        out, held = model(x), slope(model, x)
    manual = make_vit(name, fused).double()
    attentions: list[Any] = [part.module for part in attentions_of(manual)]
    for attention in attentions:
        attention.fused_attn = False
    with SoftmaxDetached(attentions):
        expected = slope(manual, x)
    assert torch.equal(out, manual(x))
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-11)
    torch.testing.assert_close(held, expected, rtol=1e-9, atol=1e-11)
    assert (held - free).abs().max() > 1e-3 * free.abs().max()


@every_vit
def test_the_output_does_not_depend_on_any_map(name: str) -> None:
    model, x = precise_vit(name)
    x.requires_grad_()
    with attention_maps(model) as maps:
        free = torch.autograd.grad(model(x).sum(), list(maps), allow_unused=True)
        with constant_attention(model):
            held = torch.autograd.grad(model(x).sum(), list(maps), allow_unused=True)
            assert all(seen.requires_grad for seen in maps)
    assert all(each is not None for each in free)
    assert all(each is None for each in held)


@every_vit
def test_nests_with_scaling_in_any_order(name: str) -> None:
    model, x = precise_vit(name)
    with scaled_attention(model, 0.3), constant_attention(model):
        inner, inner_out = slope(model, x), model(x)
    with constant_attention(model), scaled_attention(model, 0.3):
        assert torch.equal(slope(model, x), inner)
    with scaled_attention(model, 0.3):
        torch.testing.assert_close(model(x), inner_out, rtol=0, atol=1e-11)
    with constant_attention(model):
        assert not torch.allclose(slope(model, x), inner, rtol=1e-3)


def test_checkpointing_agrees_inside_the_block() -> None:
    model, x = make_vit("vit"), pixels("vit")
    with constant_attention(model):
        expected = slope(model, x)
        model.set_grad_checkpointing(True)  # type: ignore[operator]
        torch.testing.assert_close(slope(model, x), expected)


@pytest.mark.slow
@every_vit
@fused_or_not
def test_no_trace_is_left(name: str, fused: bool) -> None:
    model, x = make_vit(name, fused), pixels(name)
    plain = model(x)

    def state() -> list[Any]:
        flags = [(list(vars(module)), getattr(module, "fused_attn", None)) for module in model.modules()]
        return [flags, [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]]

    def fail(*_: Any) -> None:
        raise KeyError

    before = state()
    last: Any = attentions_of(model)[-1].module
    with pytest.raises(KeyError), constant_attention(model), last.proj.register_forward_pre_hook(fail):
        model(x)
    assert state() == before
    assert torch.equal(model(x), plain)


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(UserError, match=r"no anatomy known for toys\.TinyNet"), constant_attention(TinyNet()):
        pass
