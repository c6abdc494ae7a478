"""TORA on tiny ViTs, fresh or lively: fresh adapters do nothing, and fresh gates are all one half."""

from __future__ import annotations

from typing import Any

import torch

from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vits import make_vit

__all__ = ["MEAN", "STD", "classifier_of", "enlivened", "tora_of"]

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def classifier_of(name: str = "vit", classes: int = 5, **settings: Any) -> Classifier:
    size = settings.get("img_size", 32)
    record = ModelRecord(name, num_classes=classes, mean=MEAN, std=STD, input_size=(size, size))
    return Classifier(make_vit(name, classes=classes, **settings), record)


def tora_of(name: str = "vit", *, lively: bool = False, precise: bool = False, **settings: Any) -> Tora:
    """With `precise` in float64. Width 24 has no sixteenth, so adapters are an eighth as wide."""
    classifier = classifier_of(name).double() if precise else classifier_of(name)
    tora = Tora(classifier, ToraSettings(**{"reduction": 8, **settings}))
    return enlivened(tora) if lively else tora


def enlivened(tora: Tora, seed: int = 0, scale: float = 0.5) -> Tora:
    """Noise on everything that is trained."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tora.parameters():
            if parameter.requires_grad:
                size = parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 2.0
                parameter += scale * 2 / size * torch.randn(parameter.shape, generator=source).to(parameter)
    return tora
