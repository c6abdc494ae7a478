"""Parameters and operations of TORA: the paper's table for ViT-B/16, and a counter that watches a tiny model run."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

from toras import classifier_of, tora_of
from vitadel.adapters.tora.tora import Tora
from vitadel.adapters.tora.tora_cost import count_parameters, macs_of, multiply_accumulates, plain_shape, shape_of
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vits import make_vit, pixels

BASE = plain_shape(width=768, depth=12, patches=196, classes=1000)
HEAD = 768 * 1000 + 1000


def on_vit_b(**settings: Any) -> Tora:
    """On the meta device: shapes without numbers."""
    with torch.device("meta"):
        backbone = timm.create_model("vit_base_patch16_224", pretrained=False, num_classes=1000)
        return Tora(Classifier(backbone, ModelRecord("vit_base_patch16_224", 1000)), ToraSettings(**settings))


@pytest.mark.parametrize(
    ("settings", "total", "trained"),
    [
        ({"kind": "head"}, 88_105_656, 2 * HEAD),
        ({"kind": "single"}, 88_250_384, 12 * 76_080 + 768 + HEAD),
        ({"kind": "adapterfusion"}, 111_185_208, 1_825_920 + 21_261_312 - 12 * 768 + 1_536 + 2 * HEAD),
        ({}, 111_194_424, 24_626_768),
        ({"slot": "separate"}, 111_194_424, 24_626_768),
        ({"heads": 12, "softmax": "joint"}, 111_194_424, 24_626_768),
    ],
)
def test_parameters_on_vit_b(settings: dict[str, Any], total: int, trained: int) -> None:
    tora = on_vit_b(**settings)
    assert all(each.is_meta for each in tora.parameters())
    assert count_parameters(tora, count_unused_head=True) == total
    assert count_parameters(tora) == total - HEAD
    assert count_parameters(tora, trained=True) == trained


def test_adapters_are_a_sixteenth_as_wide() -> None:
    shapes = {name: tuple(each.shape) for name, each in on_vit_b().named_parameters()}
    assert shapes["acc.adapters.11.down.weight"] == shapes["rob.adapters.0.down.weight"] == (48, 768)
    assert shapes["acc.adapters.0.up.weight"] == (768, 48)
    assert shapes["fusion.11.value.weight"] == (768, 768)


@pytest.mark.parametrize(
    ("settings", "printed", "total"),
    [
        ({"kind": "head"}, "17.6 GMACs", 17.583e9),
        ({"kind": "single"}, "17.8 GMACs", 17.766e9),
        ({"kind": "adapterfusion"}, "24.9 GMACs", 24.929e9),
        ({}, "26.0 GMACs", 25.995e9),
        ({"slot": "separate"}, "26.1 GMACs", 26.100e9),
        ({"softmax": "token"}, "26.4 GMACs", 26.353e9),  # four products of matrices instead of three
    ],
)
def test_operations_on_vit_b(settings: dict[str, Any], printed: str, total: float) -> None:
    macs = multiply_accumulates(BASE, ToraSettings(**settings))
    assert str(macs) == printed
    assert macs.total == pytest.approx(total, abs=1e6)


def test_where_they_are_spent() -> None:
    macs = multiply_accumulates(BASE)
    assert macs.embedding == 196 * 768 * 768
    assert macs.blocks == 197 * 12 * 12 * 768**2
    assert macs.attention == 2 * 197**2 * 768 * 12
    assert macs.adapters == 2 * 12 * 197 * 2 * 768 * 48
    assert macs.projections == 5 * 12 * 197 * 768**2
    assert macs.products == 3 * 12 * 197**2 * 768
    assert macs.heads == 2 * 768 * 1000


def test_the_shape_of_a_model_is_the_plain_one() -> None:
    assert shape_of(on_vit_b()) == BASE
    assert macs_of(on_vit_b(kind="single")) == multiply_accumulates(BASE, ToraSettings(kind="single"))


@pytest.mark.parametrize("name", ["vit", "dinov2_registers", "parallel"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"heads": 2},
        {"slot": "separate"},
        {"softmax": "token", "slot": "separate"},
        {"softmax": "joint"},
        {"softmax": "adapterfusion"},
        {"kind": "adapterfusion"},
        {"kind": "single"},
        {"kind": "head"},
    ],
)
def test_a_run_costs_what_is_counted(name: str, settings: dict[str, Any]) -> None:
    """torch's own counter sees products of matrices and convolutions, two operations each."""
    tora = tora_of(name, **settings)
    for module in tora.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tora.branches(pixels(name, batch=3))
    macs = macs_of(tora)
    unseen = macs.norms
    if "adapterfusion" in settings.values():
        unseen += macs.products  # token by token
    assert counter.get_total_flops() == 2 * 3 * (macs.total - unseen)


def test_other_classes_count() -> None:
    tora = Tora(classifier_of(), ToraSettings(reduction=8), num_classes=9)
    assert macs_of(tora).heads == 2 * 24 * 9
    assert count_parameters(tora, count_unused_head=True) - count_parameters(tora) == 24 * 5 + 5
    assert make_vit("vit").get_classifier().weight.shape == (5, 24)  # type: ignore[operator]
