"""Models: any of them becomes a classifier on pixels in [0, 1]."""

from __future__ import annotations

from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.families.fan import Fan
from vitadel.backbones.families.rvt import RVT
from vitadel.backbones.load import load_model

__all__ = ["RVT", "Classifier", "Fan", "load_model", "wrap"]
