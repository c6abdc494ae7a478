"""Scaled scores on every family, fused and not, against weights changed by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, frozen, scaled_attention
from vits import VITS, make_vit, pixels, precise_vit

every_vit = pytest.mark.parametrize("name", VITS)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "manual"])


def rows(parameter: Tensor | None, factor: float, first: int, last: int) -> None:
    if parameter is not None:
        parameter.data[first:last] *= factor


def fold(attention: Any, factor: float) -> None:
    """Change the weights so that the content scores are multiplied: the same thing without any hook."""
    kind = type(attention).__name__
    if kind == "XCA":
        attention.temperature.data *= factor
    elif kind == "TalkingHeadAttn":
        attention.proj_l.weight.data *= factor
        attention.proj_l.bias.data *= factor
    elif kind in ("ClassAttn", "AttentionPoolLatent", "TokenAttention"):
        attention.q.weight.data *= factor
        attention.q.bias.data *= factor
    elif kind == "AttentionDownsample":
        attention.q.ln.bn.weight.data *= factor
        attention.q.ln.bn.bias.data *= factor
    elif hasattr(attention, "logit_scale"):
        attention.logit_scale.data += math.log(factor)
    elif hasattr(attention, "key_dim"):  # LeViT: each head's queries, keys and values lie side by side
        width = 2 * attention.key_dim + attention.val_dim
        for head in range(attention.num_heads):
            for parameter in (attention.qkv.bn.weight, attention.qkv.bn.bias):
                rows(parameter, factor, head * width, head * width + attention.key_dim)
    elif kind == "ParallelScalingBlock":
        first, width = attention.in_split[:2]
        rows(attention.in_proj.weight, factor, first, first + width)
        rows(attention.in_proj.bias, factor, first, first + width)
    elif getattr(attention, "q_norm", None).__class__.__name__ == "LayerNorm":
        attention.q_norm.weight.data *= factor
        attention.q_norm.bias.data *= factor
    elif attention.qkv is None:
        attention.q_proj.weight.data *= factor
        rows(attention.q_proj.bias, factor, 0, len(attention.q_proj.weight))
    else:
        width = len(attention.qkv.weight) // 3
        rows(attention.qkv.weight, factor, 0, width)
        rows(attention.qkv.bias, factor, 0, width)
        rows(getattr(attention, "q_bias", None), factor, 0, width)


@pytest.mark.slow
@every_vit
@fused_or_not
@pytest.mark.parametrize("gradients", [True, False])
def test_factor_one_changes_no_bit(name: str, fused: bool, gradients: bool) -> None:
    model, x = make_vit(name, fused), pixels(name)
    heads = VITS[name].heads
    ones: list[Any] = [
        1,
        1.0,
        torch.tensor(1.0),
        [1.0] * len(heads),
        torch.ones(len(heads), requires_grad=True),
        [torch.ones(count, dtype=torch.float64) for count in heads],
    ]
    with torch.set_grad_enabled(gradients):
        plain = model(x)
        for factors in ones:
            with scaled_attention(model, factors):
                assert torch.equal(model(x), plain)


@pytest.mark.slow
@every_vit
@fused_or_not
@pytest.mark.parametrize("factor", [0.3, 0.01])
def test_fused_and_manual_agree(name: str, fused: bool, factor: float) -> None:
    model, x = precise_vit(name, fused)
    reference, _ = precise_vit(name, False)
    with scaled_attention(model, factor), scaled_attention(reference, factor):
        torch.testing.assert_close(model(x), reference(x), rtol=0, atol=1e-11)


FOLDED: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in VITS]
FOLDED += [("vit", {"qk_norm": True}), ("vit", {"block_fn": ParallelScalingBlock}), ("eva02", {"qkv_fused": True})]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), FOLDED, ids=[name + "".join(more) for name, more in FOLDED])
@fused_or_not
def test_scaling_equals_folding_into_the_weights(name: str, settings: dict[str, Any], fused: bool) -> None:
    model, x = precise_vit(name, fused, **settings)
    x.requires_grad_()
    factors = [0.3 + 0.2 * place for place in range(len(attentions_of(model)))]
    folded = copy.deepcopy(model)
    for part, factor in zip(attentions_of(folded), factors, strict=True):
        fold(part.module, factor)
    expected = folded(x)
    with scaled_attention(model, factors):
        scaled = model(x)
    assert (expected - model(x)).abs().max() > 1e-3
    torch.testing.assert_close(scaled, expected, rtol=0, atol=1e-10)
    slope, expected_slope = (torch.autograd.grad(out[:, 0].sum(), x)[0] for out in (scaled, expected))
    torch.testing.assert_close(slope, expected_slope, rtol=0, atol=1e-10)


@pytest.mark.slow
@every_vit
@fused_or_not
def test_gradients_of_factors(name: str, fused: bool) -> None:
    """Against central differences, for one factor per module and one per head."""
    model, x = precise_vit(name, fused)
    heads = VITS[name].heads
    weight = torch.linspace(-1, 1, 5, dtype=torch.float64)

    def value(factors: Any) -> Tensor:
        with scaled_attention(model, factors):
            out: Tensor = model(x)
        return (out * weight).sum()

    with frozen(model):
        factors = torch.linspace(0.4, 0.9, len(heads), dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(value(factors), factors)
        shared = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (whole,) = torch.autograd.grad(value(shared), shared)
        per_head = [torch.full((count,), 0.7, dtype=torch.float64, requires_grad=True) for count in heads]
        parts = torch.autograd.grad(value(per_head), per_head)
    torch.testing.assert_close(torch.stack([part.sum() for part in parts]).sum(), whole, rtol=1e-9, atol=1e-11)
    assert all((part != 0).all() for part in parts)
    with torch.no_grad():
        for place in range(len(heads)):
            step = torch.zeros_like(factors)
            step[place] = 1e-5
            difference = (value(factors + step) - value(factors - step)) / 2e-5
            torch.testing.assert_close(slope[place], difference, rtol=1e-5, atol=1e-8)


@fused_or_not
@pytest.mark.parametrize("factor", [0.3, 2.0, 0.0, -0.5])
def test_numbers_tensors_and_rows_of_heads_mean_the_same(factor: float, fused: bool) -> None:
    """One positive number is left to the fused kernel, all else goes over the queries."""
    model, x = precise_vit("vit", fused)
    x.requires_grad_()
    parts = attentions_of(model)
    same = [
        factor,
        torch.tensor(factor, dtype=torch.float64),
        torch.tensor(factor, dtype=torch.float64, requires_grad=True),
        [[factor] * part.heads for part in parts],
    ]
    found = []
    for factors in same:
        with scaled_attention(model, factors):
            logits = model(x)
        found.append((logits.detach(), *torch.autograd.grad(logits[:, 0].sum(), x)))
    for logits, slope in found[1:]:
        torch.testing.assert_close(logits, found[0][0])
        torch.testing.assert_close(slope, found[0][1])
    assert not torch.allclose(found[0][0], model(x))


def test_plain_factors_go_with_transforms_of_functions() -> None:
    model, x = precise_vit("vit", True)
    with scaled_attention(model, 0.5), frozen(model):
        slope = torch.func.grad(lambda z: model(z)[:, 0].sum())(x)
        z = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(model(z)[:, 0].sum(), z)
    torch.testing.assert_close(slope, expected)


def test_factors_are_read_when_the_model_runs() -> None:
    model, x = precise_vit("vit")
    factors = torch.tensor([[0.5] * 3, [0.6] * 3], dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        block = scaled_attention(model, factors)
        block.__enter__()
    before = model(x)
    assert torch.autograd.grad(before.sum(), factors)[0].abs().min() > 0  # entered without gradients, run with them
    with torch.no_grad():
        factors[1] = 1.0
    after = model(x)
    block.__exit__(None, None, None)
    with scaled_attention(model, [0.5, 1.0]):
        torch.testing.assert_close(model(x), after, rtol=0, atol=1e-12)


@fused_or_not
def test_backward_only_keeps_values_and_bends_gradients(fused: bool) -> None:
    """By hand: the attention's output is a constant plus what the folded attention adds to the gradient."""
    model, x = precise_vit("vit", fused, depth=1)
    x.requires_grad_()
    folded: Any = copy.deepcopy(model)
    fold(folded.blocks[0].attn, 0.2)
    net: Any = model
    start = net._pos_embed(net.patch_embed(x))
    block, attention = net.blocks[0], folded.blocks[0].attn
    bent = attention(block.norm1(start))
    hidden = start + bent + (block.attn(block.norm1(start)) - bent).detach()
    out = net.forward_head(net.norm(hidden + block.mlp(block.norm2(hidden))))
    (expected,) = torch.autograd.grad(out.square().sum(), x)

    plain = model(x)
    with scaled_attention(model, 0.2, backward_only=True):
        kept = model(x)
        (slope,) = torch.autograd.grad(kept.square().sum(), x)
    assert torch.equal(kept, plain)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-10)
    (ordinary,) = torch.autograd.grad(plain.square().sum(), x)
    assert (slope - ordinary).abs().max() > 1e-3


def test_backward_only_shows_the_true_maps() -> None:
    model, x = make_vit("cait"), pixels("cait")
    with attention_maps(model) as maps:
        model(x)
        plain = list(maps)
        with scaled_attention(model, 0.2, backward_only=True):
            model(x)
        assert all(torch.equal(one, other) for one, other in zip(maps, plain, strict=True))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_stays_half(half: torch.dtype) -> None:
    model, x = make_vit("vit").to(half), pixels("vit").to(half)
    for factors in (0.5, torch.full((2,), 0.5), torch.full((2, 3), 0.5)):
        with torch.no_grad(), scaled_attention(model, factors):
            assert model(x).dtype is half


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([0.1] * 3, "3 factors given, but the model has 2 softmax attentions"),
        (torch.ones(1), "1 factors given, but the model has 2"),
        (torch.ones(2, 4), r"shape \(4,\) given for 'blocks.0.attn', which has 3 heads. Give one number or 3"),
        ([1.0, [0.5, 0.5]], r"shape \(2,\) given for 'blocks.1.attn'"),
        (torch.ones(2, 3, 1), r"shape \(3, 1\)"),
    ],
)
def test_wrong_numbers_of_factors(factors: Any, message: str) -> None:
    with pytest.raises(UserError, match=message), scaled_attention(make_vit("vit"), factors):
        pass


def test_an_adapter_around_the_projection_is_not_mistaken_for_the_scores() -> None:
    class LowRank(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.down = nn.Parameter(torch.randn(24, 2, dtype=torch.float64) / 5)
            self.up = nn.Parameter(torch.randn(2, 72, dtype=torch.float64) / 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) + x @ self.down @ self.up
            return out

    model, x = precise_vit("vit", False)
    merged = copy.deepcopy(model)
    for block, twin in zip(model.blocks, merged.blocks, strict=True):  # type: ignore[arg-type]
        low = LowRank(block.attn.qkv)
        twin.attn.qkv.weight.data += (low.down @ low.up).mT
        block.attn.qkv = low
    with scaled_attention(model, 0.3), scaled_attention(merged, 0.3):
        torch.testing.assert_close(model(x), merged(x), rtol=0, atol=1e-10)
