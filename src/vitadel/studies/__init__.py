"""Analyses of the papers, on any model: each is a function `study_NAME` in a module of its name, and a command."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("accumulation", "attention", "corruption_masks", "curves", "perturbations", "saturation", "scaled_blocks")

__all__ = ["accumulation", "attention", "corruption_masks", "curves", "named", "perturbations", "saturation"]
__all__ += ["scaled_blocks"]


def named(name: str) -> tuple[Any, Any]:
    """Order and function of a study by its command's name: CurvesOrder and study_curves for curves."""
    idea = name.replace("-", "_")
    module = importlib.import_module(f"vitadel.studies.{idea}")
    request = "".join(part.capitalize() for part in idea.split("_")) + "Request"
    return getattr(module, request), getattr(module, f"study_{idea}")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"vitadel.studies.{name}")
    raise AttributeError(f"module 'vitadel.studies' has no attribute {name!r}")
