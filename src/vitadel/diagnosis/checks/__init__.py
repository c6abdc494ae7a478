"""The checks of the diagnosis, one module per symptom; every `Check` in a module of this folder is run."""

from __future__ import annotations

import importlib
import pkgutil

from vitadel.diagnosis.finding import Check

__all__ = ["load_checks"]

_FIRST = ("inputs", "outputs", "gradients", "attack_comparisons", "attention_saturation")


def load_checks() -> tuple[Check, ...]:
    """All checks in the order they run: modules as in `_FIRST`, then others; checks of random models come last."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    ordered = [*_FIRST, *(name for name in names if name not in _FIRST)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in ordered]
    checks = [value for module in modules for value in vars(module).values() if isinstance(value, Check)]
    return tuple(sorted(dict.fromkeys(checks), key=lambda check: check.if_random))
