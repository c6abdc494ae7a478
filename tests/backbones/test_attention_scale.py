"""The model argument `attention_scale`: a fixed factor on scores, from the first step and wherever the model goes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vitadel
from vitadel.backbones.checkpoints import save_classifier
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.instrument.attention import scaled_attention, score_statistics
from vitadel.runtime.opening import Opening
from vits import VITS, make_vit, pixels

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}


def model_with(scale: object, **more: Any) -> Classifier:
    torch.manual_seed(0)
    kwargs = {**SMALL, "attention_scale": scale}
    return load_model("vit_tiny_patch16_224", weights="random", num_classes=10, kwargs=kwargs, **more)


@pytest.mark.parametrize("family", sorted(VITS))
def test_same_as_scaling_from_outside(family: str) -> None:
    x, plain = pixels(family), make_vit(family)
    with torch.no_grad(), scaled_attention(plain, 3.0):
        expected = plain(x)
    with torch.no_grad():
        assert torch.equal(make_vit(family, attention_scale=3.0)(x), expected)
        assert not torch.allclose(plain(x), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_same_as_folding_into_the_queries(fused: bool) -> None:
    scaled, folded = model_with(30).double(), model_with(1).double()
    for model in (scaled, folded):
        for block in model.backbone.blocks:  # type: ignore[union-attr]
            block.attn.fused_attn = fused
    for block in folded.backbone.blocks:  # type: ignore[union-attr]
        block.attn.qkv.weight.data[:24] *= 30
        block.attn.qkv.bias.data[:24] *= 30
    x = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    assert torch.allclose(scaled(x), folded(x), atol=1e-12)


def test_it_is_recorded_and_comes_back_with_the_weights(tmp_path: Path) -> None:
    model, x = model_with(30), torch.rand(2, 3, 32, 32)
    assert model.record.kwargs["attention_scale"] == 30
    save_classifier(model, tmp_path / "model.safetensors")
    again = load_model(str(tmp_path / "model.safetensors"))
    assert torch.equal(again(x), model(x))
    assert not torch.allclose(again(x), model_with(1)(x))
    assert again.record == model.record
    with pytest.raises(UserError, match="drop the arguments attention_scale"):
        load_model(str(tmp_path / "model.safetensors"), kwargs={"attention_scale": 2})


def test_a_copy_scales_its_own_modules() -> None:
    model, x = model_with(30), torch.rand(2, 3, 32, 32)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.backbone.blocks[0].attn.qkv.weight)  # type: ignore[union-attr, index]
    assert not torch.equal(other(x), model(x))
    assert torch.equal(model(x), model_with(30)(x))


def test_instruments_act_on_top_of_it() -> None:
    """Gaps are those of the scaled scores, and the factors of AAS multiply them."""
    x, found = torch.rand(2, 3, 32, 32), []
    for scale, factor in ((1, 1.0), (40, 1.0), (40, 0.25)):
        model = model_with(scale)
        with torch.no_grad(), scaled_attention(model, factor), score_statistics(model) as gaps:
            model(x)
        found.append(gaps[0])
    assert torch.allclose(found[1], 40 * found[0], rtol=1e-3, atol=1e-5)
    assert torch.allclose(found[2], 10 * found[0], rtol=1e-3, atol=1e-5)
    with vitadel.scaled_attention(model_with(40), 1 / 40):
        pass


def test_gradients_reach_the_pixels_and_the_weights() -> None:
    model, x = model_with(30), torch.rand(2, 3, 32, 32, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().sum()) > 0
    assert float(model.backbone.blocks[0].attn.qkv.weight.grad.abs().sum()) > 0  # type: ignore[union-attr, index]


def test_the_flag_of_the_command_line() -> None:
    opening = Opening.read(model="x", model_kwargs=["attention_scale=30"])
    assert opening.kwargs == {"attention_scale": 30}
    assert opening.flags() == ["--model-kwargs", "attention_scale=30"]


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), "big", True])
def test_only_positive_numbers(scale: object) -> None:
    with pytest.raises(UserError, match="attention_scale must be a positive number"):
        model_with(scale)


def test_models_without_softmax_attention() -> None:
    with pytest.raises(UserError, match=r"no anatomy known for .*ResNet"):
        load_model("resnet18", weights="random", num_classes=10, kwargs={"attention_scale": 2})
