"""Numbers of parameters of TORA on ViT-B/16, as in the paper's table."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord

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
        ({"kind": "single", "reduction": 0.6}, 87_336_656 + 768 + 12 * 1_969_664, 12 * 1_969_664 + 768 + HEAD),
        ({"kind": "adapterfusion"}, 111_185_208, 1_825_920 + 21_261_312 - 12 * 768 + 1_536 + 2 * HEAD),
        ({}, 111_194_424, 24_626_768),
        ({"slot": "separate"}, 111_194_424, 24_626_768),
        ({"heads": 12, "softmax": "joint"}, 111_194_424, 24_626_768),
    ],
)
def test_parameters_on_vit_b(settings: dict[str, Any], total: int, trained: int) -> None:
    tora = on_vit_b(**settings)
    assert all(each.is_meta for each in tora.parameters())
    assert sum(each.numel() for each in tora.parameters()) == total  # the paper counts the unused head, too
    assert sum(each.numel() for each in tora.parameters() if each.requires_grad) == trained


def test_the_wide_adapter_has_as_many_trained_parameters_as_tora() -> None:
    wide, tora = (
        sum(each.numel() for each in on_vit_b(**settings).parameters() if each.requires_grad)
        for settings in ({"kind": "single", "reduction": 0.6}, {})
    )
    assert wide == pytest.approx(tora, rel=0.01)


def test_adapters_are_a_sixteenth_as_wide() -> None:
    shapes = {name: tuple(each.shape) for name, each in on_vit_b().named_parameters()}
    assert shapes["acc.adapters.11.down.weight"] == shapes["rob.adapters.0.down.weight"] == (48, 768)
    assert shapes["acc.adapters.0.up.weight"] == (768, 48)
    assert shapes["fusion.11.value.weight"] == (768, 768)
