"""Swin of MIMIR (Xu et al. 2023, arXiv:2312.04960): every LayerNorm has eps 1e-6 where timm's has 1e-5.

Keys and shapes do not show this. The large model has windows of 14 tokens, and of 7 in its last stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.models.swin_transformer import SwinTransformer
from torch import nn

from vitadel.backbones.timm_models import data_config, register_models

__all__ = ["swin"]


def swin(**settings: Any) -> SwinTransformer:
    """Swin with LayerNorm eps 1e-6 (MIMIR, Xu et al. 2023)."""
    return SwinTransformer(norm_layer=partial(nn.LayerNorm, eps=1e-6), **settings)


_MODELS: dict[str, dict[str, Any]] = {
    "mimir_swin_base": {
        "embed_dim": 128,
        "depths": (2, 2, 18, 2),
        "num_heads": (4, 8, 16, 32),
        "window_size": 7,
    },
    "mimir_swin_large": {
        "embed_dim": 192,
        "depths": (2, 2, 18, 2),
        "num_heads": (6, 12, 24, 48),
        "window_size": 14,
    },
}

register_models(
    swin,
    _MODELS,
    {
        name: data_config(224, 0.875, classifier="head.fc", first_conv="patch_embed.proj", fixed_input_size=True)
        for name in _MODELS
    },
)
