"""A classifier's own attention factors: what they compute, and that they go wherever the model goes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

import vitadel
from vitadel.backbones.checkpoints import build_classifier, load_classifier, read_record, save_classifier
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.load import load_model
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError
from vits import VITS, make_vit, pixels, precise_vit


def scaled(family: str, factor: float = 0.3, **settings: object) -> Classifier:
    model = wrap(make_vit(family, **settings))
    model.set_attention_factors([factor * (1 + k) for k in range(len(VITS[family].heads))])
    return model


@pytest.mark.parametrize("family", sorted(VITS))
def test_same_as_scaling_from_outside(family):
    model = scaled(family)
    x = pixels(family)
    with torch.no_grad(), vitadel.scaled_attention(model.backbone, model.attention_factors):
        expected = model.backbone(x)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert not torch.allclose(model(x), model.backbone(x))  # and nothing of it stays on the backbone


@pytest.mark.parametrize("fused", [True, False])
def test_same_as_folding_into_the_queries(fused):
    backbone, x = precise_vit("vit", fused)
    folded = copy.deepcopy(backbone)
    factors = [0.25, 3.0]
    for block, factor in zip(folded.blocks, factors, strict=True):
        width = block.attn.qkv.in_features
        block.attn.qkv.weight.data[:width] *= factor
        block.attn.qkv.bias.data[:width] *= factor
    model = wrap(backbone)
    model.set_attention_factors(factors)
    torch.testing.assert_close(model(x), folded(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["vit", "xcit", "swin", "cait"])
def test_ones_change_no_bit(family):
    model = wrap(make_vit(family))
    x = pixels(family)
    before = model(x)
    model.set_attention_factors([1.0] * len(VITS[family].heads))
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("family", ["vit", "xcit", "swin"])
def test_blocks_around_the_model_multiply(family):
    model, x = scaled(family, 0.5), pixels(family)
    twin = copy.deepcopy(model)
    twin.set_attention_factors((0.25 * model.attention_factors).tolist())
    with torch.no_grad(), vitadel.scaled_attention(model, 0.25):
        inside = model(x)
    torch.testing.assert_close(inside, twin(x).detach(), rtol=1e-4, atol=1e-5)


def test_maps_are_those_of_the_scaled_scores():
    model, x = scaled("vit"), pixels("vit")
    with torch.no_grad(), vitadel.attention_maps(model) as maps:
        model(x)
    scaling = vitadel.scaled_attention(model.backbone, model.attention_factors)
    with torch.no_grad(), scaling, vitadel.attention_maps(model.backbone) as expected:
        model.backbone(x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(maps, expected, strict=True))


def test_gradients_reach_pixels_and_weights_through_the_factors():
    model, x = scaled("vit"), pixels("vit").requires_grad_()
    model(x)[:, 0].sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert model.attention_factors.grad is None
    assert all(weight.grad is not None for weight in model.parameters())


def test_state_and_copies_carry_them():
    model, x = scaled("xcit"), pixels("xcit")
    twin = copy.deepcopy(model)
    other = wrap(make_vit("xcit", seed=9))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*attention_factors"):
        other.load_state_dict(model.state_dict())
    other.set_attention_factors([1.0] * len(model.attention_factors))
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(x), model(x))
    assert torch.equal(other(x), model(x))
    twin.set_attention_factors([1.0] * len(model.attention_factors))
    assert model.attention_factors[0] == pytest.approx(0.3)
    assert other.record.attention_factors == model.record.attention_factors != twin.record.attention_factors


def test_moving_to_half_precision_does_not_round_them():
    model = scaled("vit", 1 / 3).bfloat16()
    assert model.attention_factors.dtype == torch.float32
    assert model.attention_factors.tolist() == torch.tensor([1 / 3, 2 / 3]).tolist()
    assert model(pixels("vit")).isfinite().all()


@pytest.mark.parametrize("family", ["vit", "xcit", "swin"])
def test_round_trip_through_a_file(family, tmp_path: Path):
    tiny = VITS[family]
    record = ModelRecord(tiny.timm_name, 5, tiny.settings, input_size=(tiny.size, tiny.size))
    model = build_classifier(record)
    assert model.attention_factors is None
    model.set_attention_factors([0.1 * (1 + k) for k in range(len(tiny.heads))])
    path = tmp_path / "model.safetensors"
    save_classifier(model, path)
    x = pixels(family)
    with torch.no_grad():
        for loaded in (load_classifier(path), load_model(str(path)), load_model(tiny.timm_name, weights=path)):
            assert torch.equal(loaded.attention_factors, model.attention_factors)
            assert torch.equal(loaded(x), model(x))
    assert read_record(path).attention_factors == tuple(model.attention_factors.tolist())


def test_a_record_without_them_is_read_as_before():
    values = json.loads(ModelRecord("vit_tiny_patch16_224").to_json())
    assert values.pop("attention_factors") is None
    assert ModelRecord.from_json(json.dumps(values)) == ModelRecord("vit_tiny_patch16_224")


@pytest.mark.slow
def test_compiled_models_use_them():
    model, x = scaled("vit"), pixels("vit")
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("factors", [[0.5], [0.5, 0.5, 0.5], [0.5, float("nan")], [0.5, 0.0], [0.5, -1.0]])
def test_other_numbers_are_refused(factors):
    model = wrap(make_vit("vit"))
    with pytest.raises(UserError, match="must be 2 finite numbers above 0"):
        model.set_attention_factors(factors)
    assert model.attention_factors is None
