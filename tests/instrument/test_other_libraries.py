"""Instruments on models of transformers and torchvision, against these libraries' own outputs and closed forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitadel
from other_vits import HUGGING_FACE, OTHERS, make_other, pixels_for
from vitadel.backbones.anatomy import attentions_of, blocks_of, family_of, has_class_token, prefix_tokens_of
from vitadel.errors import UserError
from vitadel.instrument.attention import constant_attention
from vitadel.instrument.attention_rows import attention_over_patches
from vitadel.instrument.tokens import patch_grid, token_width

every = pytest.mark.parametrize("name", OTHERS)
EAGER = [f"{name}-eager" for name in HUGGING_FACE]
TOKENED = [name for name, other in OTHERS.items() if other.takes_tokens]


def logits(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


def with_scaled_queries(name: str, factor: float) -> nn.Module:
    """The same model whose queries are longer: scores grow by the factor, position biases and masks stay."""
    model = make_other(name)
    with torch.no_grad():
        for part in attentions_of(model):
            for kind in ("weight", "bias"):
                if isinstance(part.module, nn.MultiheadAttention):
                    packed = getattr(part.module, f"in_proj_{kind}")
                elif hasattr(part.module, "qkv"):
                    packed = getattr(part.module.qkv, kind)
                else:
                    own = getattr(part.module.q_proj, kind)
                    own *= 1 if own is None else factor
                    continue
                packed[: len(packed) // 3] *= factor
    return model


@every
def test_parts_are_known(name: str) -> None:
    model, other = make_other(name), OTHERS[name]
    assert family_of(model) == other.family
    assert tuple(part.heads for part in attentions_of(model)) == other.heads
    assert len(blocks_of(model)) == other.blocks
    assert prefix_tokens_of(model) == other.prefix
    assert has_class_token(model) == (other.prefix > 0)
    assert patch_grid(model, pixels_for()) == ((8, 8) if other.windows else (4, 4))


@every
def test_scaled_attention_is_a_model_with_scaled_queries(name: str) -> None:
    model, x = make_other(name), pixels_for()
    plain = logits(model, x)
    with torch.no_grad(), vitadel.scaled_attention(model, 0.3):
        found = logits(model, x)
    if name.endswith("v2"):  # cosines do not depend on the length of queries: their temperature is what is scaled
        for part in attentions_of(model):
            part.module.logit_scale.data += torch.log(torch.tensor(0.3))
        expected = logits(model, x)
    else:
        expected = logits(with_scaled_queries(name, 0.3), x)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found, plain, atol=1e-3)


@every
def test_maps_sum_to_one_change_nothing_and_leave_no_trace(name: str) -> None:
    model, x = make_other(name), pixels_for()
    before = logits(model, x)
    with torch.no_grad(), vitadel.attention_maps(model) as maps, vitadel.score_statistics(model) as gaps:
        during = logits(model, x)
    assert torch.allclose(before, during, atol=1e-6)
    assert torch.equal(before, logits(model, x))
    for seen, gap, heads in zip(maps, gaps, OTHERS[name].heads, strict=True):
        assert seen.shape[1] == heads
        assert torch.allclose(seen.sum(-1), torch.ones((), dtype=seen.dtype), atol=1e-5)
        assert gap.shape == seen.shape[:-1]
    assert not any("forward" in part.module.__dict__ for part in attentions_of(model))


@pytest.mark.parametrize("name", EAGER)
def test_maps_are_those_that_transformers_returns(name: str) -> None:
    eager, sdpa, x = make_other(name), make_other(name.replace("eager", "sdpa")), pixels_for()
    own = eager(x, output_attentions=True).attentions
    for model in (eager, sdpa):
        with torch.no_grad(), vitadel.attention_maps(model) as maps:
            model(x)
        returned = len(own) if OTHERS[name].windows else len(OTHERS[name].heads)  # of a Swin, one for each stage
        assert len(own) == returned
        same = [s.shape == e.shape and torch.allclose(s, e.to(s), atol=1e-5) for e in own for s in maps]
        assert sum(same) == returned


def test_maps_are_those_that_torchvision_returns() -> None:
    model, x = make_other("torchvision"), pixels_for()
    assert isinstance(model.encoder.layers[1].self_attention, nn.MultiheadAttention)
    with torch.no_grad(), vitadel.attention_maps(model) as maps, vitadel.block_features(model, [0]) as features:
        model(x)
    block = model.encoder.layers[1]
    h = block.ln_1(features[0])
    _, expected = block.self_attention(h, h, h, average_attn_weights=False)
    assert torch.allclose(maps[1], expected, atol=1e-10)


@pytest.mark.parametrize("name", EAGER)
def test_features_are_the_hidden_states_of_transformers(name: str) -> None:
    model, x = make_other(name), pixels_for()
    with torch.no_grad(), vitadel.block_features(model) as features:
        states = model(x, output_hidden_states=True).hidden_states
    assert len(features) == OTHERS[name].blocks
    kept = [state for state in states[1:] if any(torch.equal(state, each) for each in features)]
    assert len(kept) >= (1 if OTHERS[name].windows else OTHERS[name].blocks - 1)  # Swin lists stages, after merging


@every
def test_backward_only_and_constant_attention_keep_the_outputs(name: str) -> None:
    model, x = make_other(name), pixels_for().requires_grad_()
    (plain,) = torch.autograd.grad(logits(model, x).sum(), x)
    with vitadel.scaled_attention(model, 0.1, backward_only=True):
        output = logits(model, x)
        (slope,) = torch.autograd.grad(output.sum(), x)
    assert torch.allclose(output, logits(model, x), atol=1e-9)
    assert not torch.allclose(slope, plain, rtol=1e-2)
    with constant_attention(model):
        output = logits(model, x)
        (slope,) = torch.autograd.grad(output.sum(), x)
    assert torch.allclose(output, logits(model, x), atol=1e-6)
    assert not torch.allclose(slope, plain, rtol=1e-2)


@pytest.mark.parametrize("name", TOKENED)
def test_extra_tokens_act_and_leave(name: str) -> None:
    model, x = make_other(name), pixels_for()
    assert token_width(model) == 24
    tokens = torch.randn(3, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad(), vitadel.extra_tokens(model, tokens), vitadel.block_features(model) as features:
        found = logits(model, x)
        assert patch_grid(model, x) == (4, 4)
    assert features[0].shape[1] == OTHERS[name].prefix + 3 + 16
    plain = logits(model, x)
    assert not torch.allclose(found, plain, atol=1e-4)
    with torch.no_grad(), vitadel.extra_tokens(model, tokens, placement="append"):
        assert torch.allclose(found, logits(model, x), atol=1e-8)  # attention does not depend on the order
    with torch.no_grad(), vitadel.extra_tokens(model, tokens[:0]):
        assert torch.equal(logits(model, x), plain)


@pytest.mark.parametrize("name", sorted(set(OTHERS) - set(TOKENED)))
def test_no_tokens_where_they_have_no_place(name: str) -> None:
    with (
        pytest.raises(UserError, match=f"no meaning for family '{OTHERS[name].family}'"),
        vitadel.extra_tokens(make_other(name), torch.zeros(1, 24)),
    ):
        pass


@every
def test_attention_over_patches(name: str) -> None:
    model, x = make_other(name), pixels_for()
    found = attention_over_patches(model, x)
    assert found.shape == (2, 4, 4)  # a Swin's last stage has one window
    assert torch.allclose(found.sum((1, 2)), torch.ones(2))
