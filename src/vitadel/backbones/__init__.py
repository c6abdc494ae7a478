"""Models: each becomes a classifier on pixels in [0, 1]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.load import load_model

if TYPE_CHECKING:
    from vitadel.backbones.families.fan import Fan
    from vitadel.backbones.families.rvt import RVT

__all__ = ["RVT", "Classifier", "Fan", "load_model", "wrap"]


def __getattr__(name: str) -> object:
    """Import RVT and FAN only when they are used."""
    if name == "RVT":
        from vitadel.backbones.families.rvt import RVT

        return RVT
    if name == "Fan":
        from vitadel.backbones.families.fan import Fan

        return Fan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
