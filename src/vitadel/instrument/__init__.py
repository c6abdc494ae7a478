"""Instrumentation as `with` blocks that leave no trace: scale attention, read maps and features, add tokens."""

from __future__ import annotations

from vitadel.instrument.attention import attention_maps, scaled_attention, score_statistics
from vitadel.instrument.hooks import block_features, frozen, hooked
from vitadel.instrument.tokens import extra_tokens

__all__ = [
    "attention_maps",
    "block_features",
    "extra_tokens",
    "frozen",
    "hooked",
    "scaled_attention",
    "score_statistics",
]
