"""Vitadel: is this Vision Transformer really robust? Attacks, audits and hardening for ViTs.

Nothing is imported until it is used: `import vitadel` stays instant and does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitadel.errors import Mistake, UserError
from vitadel.version import __version__

if TYPE_CHECKING:
    from vitadel import attacks, studies
    from vitadel.adapters.adapted_model import open_model
    from vitadel.backbones import Classifier, load_model, wrap
    from vitadel.data import open_dataset
    from vitadel.diagnosis.run import diagnose
    from vitadel.evaluation.activations import massive_activations
    from vitadel.evaluation.audit.adversarial_examples import attack
    from vitadel.evaluation.audit.audit import audit
    from vitadel.evaluation.benchmark import benchmark
    from vitadel.evaluation.trade_off.run import trade_off
    from vitadel.heads.probe import probe
    from vitadel.instrument import attention_maps, block_features, extra_tokens, scaled_attention, score_statistics
    from vitadel.studies import study
    from vitadel.training.run import harden

__all__ = [
    "Classifier",
    "Mistake",
    "UserError",
    "__version__",
    "attack",
    "attacks",
    "attention_maps",
    "audit",
    "benchmark",
    "block_features",
    "diagnose",
    "extra_tokens",
    "harden",
    "load_model",
    "massive_activations",
    "open_dataset",
    "open_model",
    "probe",
    "scaled_attention",
    "score_statistics",
    "studies",
    "study",
    "trade_off",
    "wrap",
]

_HOMES = {
    "Classifier": "vitadel.backbones",
    "attack": "vitadel.evaluation.audit.adversarial_examples",
    "attention_maps": "vitadel.instrument",
    "audit": "vitadel.evaluation.audit.audit",
    "benchmark": "vitadel.evaluation.benchmark",
    "block_features": "vitadel.instrument",
    "diagnose": "vitadel.diagnosis.run",
    "extra_tokens": "vitadel.instrument",
    "harden": "vitadel.training.run",
    "load_model": "vitadel.backbones",
    "massive_activations": "vitadel.evaluation.activations",
    "open_dataset": "vitadel.data",
    "open_model": "vitadel.adapters.adapted_model",
    "probe": "vitadel.heads.probe",
    "scaled_attention": "vitadel.instrument",
    "score_statistics": "vitadel.instrument",
    "study": "vitadel.studies",
    "trade_off": "vitadel.evaluation.trade_off.run",
    "wrap": "vitadel.backbones",
}


def __getattr__(name: str) -> Any:
    if name in ("attacks", "studies"):
        return importlib.import_module(f"vitadel.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'vitadel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
