"""Fully attentional networks, FAN (Zhou et al., "Understanding the Robustness in Vision Transformers", ICML 2022).

The eight models of the paper and four for images of 32 pixels, by name in timm's registry once this module is imported.
No weights are downloaded: all start untrained.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
from timm.layers import to_2tuple, trunc_normal_
from timm.models import checkpoint
from timm.models.xcit import ClassAttentionBlock, PositionalEncodingFourier
from torch import Tensor, nn

from vitadel.backbones.families.fan_blocks import FanBlock
from vitadel.backbones.families.fan_stems import HybridEmbed, conv_embed
from vitadel.backbones.families.registration import data_config, register_models
from vitadel.errors import UserError

__all__ = ["Fan"]

_CLASS_LAYERS = 2
_norm = partial(nn.LayerNorm, eps=1e-6)


class Fan(nn.Module):
    """A fully attentional network, FAN (Zhou et al., ICML 2022).

    Stem, position encoding, FAN blocks on patch tokens, two class-attention blocks, norm and head.
    With `stem_depths`, the numbers of blocks of two ConvNeXt stages of widths `stem_dims`, it is a hybrid; without, the
    stem is four convolutions. Nothing depends on the size of the images: `img_size` is noted only. `drop_path_rate` is
    that of every FAN block. `patch_size`: 1, 2, 4, 8 or 16, of a hybrid a multiple of 4.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        stem_dims: tuple[int, int] = (128, 256),
        stem_depths: tuple[int, int] | None = None,
        head_init_scale: float = 1.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise UserError(f"a width of {embed_dim} cannot be shared by {num_heads} heads; give a multiple.")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.grad_checkpointing = False
        size = to_2tuple(img_size)
        self.patch_embed: nn.Module = (
            conv_embed(size, patch_size, in_chans, embed_dim)
            if stem_depths is None
            else HybridEmbed(size, patch_size, in_chans, embed_dim, stem_dims, stem_depths)
        )
        self.pos_embed = PositionalEncodingFourier(hidden_dim=32, dim=embed_dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.blocks = nn.ModuleList(
            FanBlock(embed_dim, num_heads, mlp_ratio, proj_drop_rate, attn_drop_rate, drop_path_rate)
            for _ in range(depth)
        )
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{place}"} for place in range(depth)
        ]
        # With `tokens_norm` its patch tokens leave doubled: not as in CaiT, but what the published numbers come from.
        self.class_blocks = nn.ModuleList(
            ClassAttentionBlock(
                embed_dim,
                num_heads,
                mlp_ratio,
                qkv_bias=True,
                proj_drop=proj_drop_rate,
                attn_drop=attn_drop_rate,
                norm_layer=_norm,
                eta=1.0,
                tokens_norm=True,
            )
            for _ in range(_CLASS_LAYERS)
        )
        self.norm = _norm(embed_dim)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = _linear_head(embed_dim, num_classes)
        self.apply(_initialise)
        trunc_normal_(self.cls_token, std=0.02)
        if isinstance(self.head, nn.Linear):
            with torch.no_grad():
                self.head.weight.mul_(head_init_scale)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters, as timm's optimisers ask for them."""
        return {"cls_token", *(name for name, _ in self.named_parameters() if name.endswith("temperature"))}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh head for another number of classes; 0 for none."""
        self.num_classes = num_classes
        old = next(self.norm.parameters())
        self.head = _linear_head(self.embed_dim, num_classes).to(old.device, old.dtype)
        self.head.apply(_initialise)

    def forward_features(self, x: Tensor) -> Tensor:
        """Class token and patch tokens after class attention and norm: (batch, 1 + tokens, channels)."""
        tokens, grid = self.patch_embed(x)
        tokens = tokens + self.pos_embed(1, *grid).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, grid) if self._recomputes() else block(tokens, grid)
        # As many class tokens as there are rows now: an instrument may have stacked several streams.
        tokens = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], dim=1)
        for block in self.class_blocks:
            tokens = checkpoint(block, tokens) if self._recomputes() else block(tokens)
        return cast(Tensor, self.norm(tokens))

    def _recomputes(self) -> bool:
        return self.grad_checkpointing and torch.is_grad_enabled()

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(x[:, 0])
        return x if pre_logits else cast(Tensor, self.head(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _linear_head(width: int, num_classes: int) -> nn.Module:
    return nn.Linear(width, num_classes) if num_classes > 0 else nn.Identity()


def _initialise(module: nn.Module) -> None:
    """Linear layers truncated normal of 0.02, convolutions normal of sqrt(2 / fan-out), no biases."""
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)


# What each is, beyond the defaults of `Fan`. Depths are those that were trained, whatever the names of hybrids say.
_HYBRID = {"stem_depths": (3, 3)}
_LARGE_HYBRID = {"stem_depths": (3, 5), "head_init_scale": 0.001}
_MICRO_HYBRID = {"stem_depths": (2, 2), "stem_dims": (32, 64)}
_SMALL = {"img_size": 32, "patch_size": 4}  # 8 x 8 tokens
_MODELS: dict[str, dict[str, Any]] = {
    "fan_tiny_12_p16_224": {"embed_dim": 192, "depth": 12, "num_heads": 4},
    "fan_small_12_p16_224": {"embed_dim": 384, "depth": 12, "num_heads": 8},
    "fan_base_18_p16_224": {"embed_dim": 448, "depth": 18, "num_heads": 8},
    "fan_large_24_p16_224": {"embed_dim": 480, "depth": 24, "num_heads": 10},
    "fan_tiny_8_p4_hybrid": {"embed_dim": 192, "depth": 8, "num_heads": 8, **_HYBRID},
    "fan_small_12_p4_hybrid": {"embed_dim": 384, "depth": 10, "num_heads": 8, **_HYBRID},
    "fan_base_16_p4_hybrid": {"embed_dim": 448, "depth": 16, "num_heads": 8, **_HYBRID},
    "fan_large_16_p4_hybrid": {"embed_dim": 480, "depth": 22, "num_heads": 10, **_LARGE_HYBRID},
    "fan_tiny_32": {"embed_dim": 192, "depth": 12, "num_heads": 4, **_SMALL},
    "fan_tiny_hybrid_32": {"embed_dim": 192, "depth": 8, "num_heads": 8, **_HYBRID, **_SMALL},
    "fan_micro_32": {"embed_dim": 128, "depth": 6, "num_heads": 4, **_SMALL},
    "fan_micro_hybrid_32": {"embed_dim": 128, "depth": 5, "num_heads": 4, **_MICRO_HYBRID, **_SMALL},
}
register_models(Fan, _MODELS, {name: data_config(row.get("img_size", 224)) for name, row in _MODELS.items()})
