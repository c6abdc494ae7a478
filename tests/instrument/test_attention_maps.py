"""Maps and score gaps of every family, against computations that use no hooks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.instrument import attention_maps, scaled_attention, score_statistics
from vits import VITS, make_vit, pixels, precise_vit

every_vit = pytest.mark.parametrize("name", VITS)
fused_or_not = pytest.mark.parametrize("fused", [True, False], ids=["fused", "manual"])


def position_scores(model: nn.Module) -> list[Tensor]:
    """What stays of the scores when the content is nothing: bias and mask, ready to broadcast over maps."""
    found = []
    modules = dict(model.named_modules())
    for part in attentions_of(model):
        attention: Any = part.module
        scores = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        if hasattr(attention, "attention_biases"):
            scores = attention.attention_biases[:, attention.attention_bias_idxs][None]
        elif hasattr(attention, "cpb_mlp"):
            table = 16 * torch.sigmoid(attention.cpb_mlp(attention.relative_coords_table).flatten(0, 2))
            scores = table[attention.relative_position_index].permute(2, 0, 1)[None]
        elif hasattr(attention, "relative_position_bias_table"):
            scores = attention.relative_position_bias_table[attention.relative_position_index].permute(2, 0, 1)[None]
        mask = getattr(modules[part.name.rsplit(".", 1)[0]], "attn_mask", None)
        found.append(scores if mask is None else scores + mask[:, None].repeat(2, 1, 1, 1))  # for a batch of two
    return found


class Counting(TorchFunctionMode):
    """Counts softmaxes, fused ones too."""

    count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (torch.Tensor.softmax, F.softmax, F.scaled_dot_product_attention)
        return func(*args, **(kwargs or {}))


@every_vit
@fused_or_not
def test_every_softmax_is_known_and_none_besides(name: str, fused: bool) -> None:
    model = make_vit(name, fused)
    with Counting() as counting:
        model(pixels(name))
    assert len(attentions_of(model)) == len(VITS[name].heads) == counting.count - VITS[name].other_softmaxes


@every_vit
def test_without_content_only_bias_and_mask_are_left(name: str) -> None:
    model, x = precise_vit(name)
    with torch.no_grad(), scaled_attention(model, 0.0), attention_maps(model) as maps:
        model(x)
        for seen, scores in zip(maps, position_scores(model), strict=True):
            expected = scores.expand(-1, -1, *seen.shape[2:]).softmax(-1).expand_as(seen)
            torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)


@every_vit
def test_scaled_maps_are_the_softmax_of_scaled_scores(name: str) -> None:
    """log p(f) = f log p(1) + (1 - f) log p(0) + a constant per row; only one module at a time is scaled."""
    model, x = precise_vit(name)
    with torch.no_grad(), attention_maps(model) as maps:
        model(x)
        plain, rest = list(maps), position_scores(model)
        for place, part in enumerate(attentions_of(model)):
            factors: list[Any] = [1.0] * len(maps)
            factors[place] = [0.25 + 0.5 * head for head in range(part.heads)]
            with scaled_attention(model, factors):
                model(x)
            row = torch.tensor(factors[place], dtype=torch.float64).view(-1, 1, 1)
            expected = (row * plain[place].log() + (1 - row) * rest[place]).softmax(-1)
            assert torch.equal(maps[0], plain[0]) or place == 0
            torch.testing.assert_close(maps[place], expected, rtol=0, atol=1e-9)
            assert (maps[place] - plain[place]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["swin", "swinv2"])
@fused_or_not
def test_shifted_windows_do_not_leak(name: str, fused: bool) -> None:
    model, x = make_vit(name, fused), pixels(name)
    masks: list[Any] = [block.attn_mask for block in model.modules() if hasattr(block, "attn_mask")]
    assert sum(mask is not None for mask in masks) == 1
    with torch.no_grad(), scaled_attention(model, 0.01), attention_maps(model) as maps:
        model(x)
    for seen, mask in zip(maps, masks, strict=True):
        if mask is not None:
            apart = (mask < -1)[:, None].repeat(len(x), seen.shape[1], 1, 1)
            assert apart.float().mean() > 0.1
            assert seen[apart].max() < 1e-20
            assert seen[~apart].min() > 1e-3


def test_vit_maps_equal_a_computation_by_hand() -> None:
    model, x = precise_vit("vit", True)
    net: Any = model
    tokens = net._pos_embed(net.patch_embed(x))
    with attention_maps(model) as maps, score_statistics(model) as gaps:
        model(x)
    for block, seen, gap in zip(net.blocks, maps, gaps, strict=True):
        q, k, _ = block.attn.qkv(block.norm1(tokens)).view(2, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(8)
        torch.testing.assert_close(seen, scores.softmax(-1), rtol=0, atol=1e-12)
        ordered = scores.sort(dim=-1, descending=True).values
        torch.testing.assert_close(gap, ordered[..., 0] - ordered[..., 1], rtol=0, atol=1e-12)
        tokens = block(tokens)


@pytest.mark.slow
@every_vit
@fused_or_not
@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_maps_are_distributions_and_gaps_belong_to_them(name: str, fused: bool, factor: float) -> None:
    model, x = precise_vit(name, fused)
    with torch.no_grad(), scaled_attention(model, factor):
        with attention_maps(model) as maps, score_statistics(model) as gaps:
            out = model(x)
        torch.testing.assert_close(out, model(x), rtol=0, atol=1e-11)
    for seen, gap, heads in zip(maps, gaps, VITS[name].heads, strict=True):
        assert seen.shape[1] == heads
        torch.testing.assert_close(seen.sum(-1), torch.ones_like(gap), rtol=0, atol=1e-12)
        top = seen.log().topk(2).values
        torch.testing.assert_close(gap, top[..., 0] - top[..., 1], rtol=0, atol=1e-9)


def test_gaps_do_not_saturate_where_probabilities_do() -> None:
    model, x = make_vit("vit"), pixels("vit")
    with torch.no_grad(), score_statistics(model) as gaps:
        model(x)
        plain = gaps[0]
        with scaled_attention(model, [1000.0, 1.0]), attention_maps(model) as maps:
            model(x)
    assert (maps[0].topk(2).values[..., 1] == 0).any()
    torch.testing.assert_close(gaps[0], 1000 * plain, rtol=1e-3, atol=1e-2)


def test_a_single_key_has_an_infinite_gap() -> None:
    model = make_vit("levit", img_size=32)
    with torch.no_grad(), score_statistics(model) as gaps:
        model(torch.rand(1, 3, 32, 32))
    assert gaps[2].shape == (1, 3, 1)
    assert gaps[2].isinf().all()


def test_maps_carry_their_graph() -> None:
    model, x = make_vit("vit"), pixels("vit").requires_grad_()
    with attention_maps(model) as maps:
        model(x)
        assert torch.autograd.grad(maps[1][:, :, 0, 3].sum(), x)[0].abs().max() > 0
        with torch.no_grad():
            model(x)
        assert not maps[1].requires_grad


def test_maps_are_taken_before_dropout_and_of_the_last_run() -> None:
    model, x = make_vit("vit", attn_drop_rate=0.5).train(), pixels("vit")
    with attention_maps(model) as maps:
        model(torch.rand(5, 3, 32, 32))
        model(x)
    assert maps[0].shape == (2, 3, 17, 17)
    torch.testing.assert_close(maps[0].sum(-1), torch.ones(2, 3, 17))
    assert maps.names == ("blocks.0.attn", "blocks.1.attn")


def test_reading_before_running_is_refused() -> None:
    with attention_maps(make_vit("vit")) as maps, pytest.raises(UserError, match=r"'blocks\.1\.attn'.*run the model"):
        maps[-1]
    with pytest.raises(IndexError):
        maps[2]
