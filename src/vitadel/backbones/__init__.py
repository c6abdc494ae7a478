"""Models: any of them becomes a classifier on pixels in [0, 1]."""

from __future__ import annotations

from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.load import load_model

__all__ = ["Classifier", "load_model", "wrap"]
