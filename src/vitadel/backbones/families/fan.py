"""Fully attentional networks, FAN (Zhou et al., "Understanding the Robustness in Vision Transformers", ICML 2022).

The eight models of the paper (arXiv:2204.12451) and four for images of 32 pixels, registered with timm when this
module is imported. No weights are downloaded: all start untrained.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm, LayerNorm2d, to_2tuple, trunc_normal_, use_fused_attn
from timm.models import checkpoint
from timm.models.convnext import ConvNeXtStage
from timm.models.xcit import LPI, ClassAttentionBlock, ConvPatchEmbed, PositionalEncodingFourier
from torch import Tensor, nn

from vitadel.backbones.small_images import cannot_shrink, set_stem_patch_size, shrink_kernel
from vitadel.backbones.timm_models import data_config, register_models
from vitadel.errors import UserError

__all__ = ["ChannelProcessing", "Fan", "FanBlock", "HybridEmbed", "TokenAttention"]

_CLASS_LAYERS = 2
_AFTER_FIRST = 4  # by what factor the hybrid stem reduces the grid after its first convolution
_norm = partial(nn.LayerNorm, eps=1e-6)


class TokenAttention(nn.Module):
    """Multi-head self-attention with queries of one projection and keys and values of another."""

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.0, proj_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.fused_attn = use_fused_attn()
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            maps = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
            mixed = self.attn_drop(maps) @ v
        out: Tensor = self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        return out


class ConvMlp(nn.Module):
    """An MLP whose only nonlinearity is local: depthwise convolutions over the grid of tokens, with a skip."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.local = LPI(hidden)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        hidden = self.fc1(x)
        hidden = self.gamma * self.local(hidden, *grid) + hidden
        out: Tensor = self.drop(self.fc2(self.drop(hidden)))
        return out


class ChannelProcessing(nn.Module):
    """The MLP's output, each channel times a gate: the similarity of the channel's and its head's weights of tokens.

    Equation 7 of the paper, of linear cost; the published models do not use equation 6.
    """

    def __init__(self, dim: int, num_heads: int, mlp_ratio: float = 4.0, drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.temperature = nn.Parameter(torch.ones(num_heads, 1))
        self.mlp = ConvMlp(dim, int(dim * mlp_ratio), drop)
        self.norm_v = nn.LayerNorm(dim, eps=1e-6)

    def gate(self, x: Tensor) -> Tensor:
        """(batch, tokens, channels) -> (batch, 1, channels)."""
        q = self.q(x).softmax(dim=1).unflatten(-1, (self.num_heads, -1))
        k = x.softmax(dim=1).unflatten(-1, (self.num_heads, -1)).mean(dim=-1, keepdim=True)
        similarity: Tensor = (q * k).sum(dim=1, keepdim=True)
        return (similarity.sigmoid() * self.temperature).flatten(2)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        out: Tensor = self.gate(x) * self.norm_v(self.mlp(x, grid))
        return out


class FanBlock(nn.Module):
    """Token attention and channel processing, each on a residual branch with a scale per channel."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = TokenAttention(dim, num_heads, attn_drop, proj_drop)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.channels = ChannelProcessing(dim, num_heads, mlp_ratio, proj_drop)
        self.gamma2 = nn.Parameter(torch.ones(dim))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.gamma1 * self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.gamma2 * self.channels(self.norm2(x), grid))
        return out


def _conv_embed(img_size: tuple[int, int], patch_size: int, in_chans: int, embed_dim: int) -> ConvPatchEmbed:
    """XCiT's stem of four 3x3 convolutions with batch norm: (images) -> (tokens, (rows, columns))."""
    if embed_dim % 8:
        raise UserError(
            f"embed_dim {embed_dim} is not a multiple of 8, and the stem of FAN doubles its width three times to reach "
            "it. Give a multiple of 8."
        )
    embed = ConvPatchEmbed(img_size=img_size, patch_size=16, in_chans=in_chans, embed_dim=embed_dim)
    set_stem_patch_size(embed, img_size, patch_size)
    return embed


class HybridEmbed(nn.Module):
    """Two ConvNeXt stages and a 2x2 convolution to the width of the tokens: (images) -> (tokens, (rows, columns)).

    The stride of the first convolution is `patch_size / 4`: 4 pixels for patches of 16, 1 for patches of 4.
    """

    needs_whole_patches = True

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        dims: tuple[int, int] = (128, 256),
        depths: tuple[int, int] = (3, 3),
    ) -> None:
        super().__init__()
        first, rest = divmod(patch_size, _AFTER_FIRST)
        if rest or first < 1:
            raise UserError(f"the hybrid stem of FAN makes patches of 4, 8, 12, 16 ... pixels, not of {patch_size}.")
        self.stem = nn.Sequential(nn.Conv2d(in_chans, dims[0], first, first), LayerNorm2d(dims[0], eps=1e-6))
        stage = partial(
            ConvNeXtStage,
            ls_init_value=1e-6,
            norm_layer=partial(LayerNorm2d, eps=1e-6),
            norm_layer_cl=partial(LayerNorm, eps=1e-6),
        )
        self.stages = nn.Sequential(
            stage(dims[0], dims[0], stride=1, depth=depths[0]), stage(dims[0], dims[1], stride=2, depth=depths[1])
        )
        self.proj = nn.Conv2d(dims[1], embed_dim, 2, 2)
        self._set_sizes(img_size, patch_size)

    def set_patch_size(self, image_size: int, patch_size: int) -> None:
        """Shrink the kernel of the first convolution, as `adapt_to_small_images` does for ViT."""
        first = cast(nn.Conv2d, self.stem[0])
        size, rest = divmod(first.kernel_size[0] * patch_size, self.patch_size)
        if rest or first.kernel_size[0] % size:
            raise cannot_shrink(self.patch_size, patch_size, "Hybrids of patch 16 go to 8 and 4")
        self.stem[0] = shrink_kernel(first, size)
        self._set_sizes((image_size, image_size), patch_size)

    def _set_sizes(self, img_size: tuple[int, int], patch_size: int) -> None:
        self.patch_size = patch_size
        self.img_size = img_size
        self.num_patches = (img_size[0] // self.patch_size) * (img_size[1] // self.patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        maps: Tensor = self.proj(self.stages(self.stem(x)))
        return maps.flatten(2).transpose(1, 2), (maps.shape[2], maps.shape[3])


class Fan(nn.Module):
    """A fully attentional network, FAN (Zhou et al., ICML 2022).

    Stem, position encoding, FAN blocks on patch tokens, two class-attention blocks, norm and head.
    With `stem_depths`, the numbers of blocks of two ConvNeXt stages of widths `stem_dims`, the model is a hybrid;
    otherwise the stem is four convolutions. Images may have any size: `img_size` is only recorded. `drop_path_rate` is
    that of every FAN block. `patch_size`: 1, 2, 4, 8 or 16; a multiple of 4 for hybrids.
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
            raise UserError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}; give a multiple.")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.grad_checkpointing = False
        size = to_2tuple(img_size)
        self.patch_embed: nn.Module = (
            _conv_embed(size, patch_size, in_chans, embed_dim)
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
        # `tokens_norm` doubles the patch tokens: unlike CaiT, but as in the published models.
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
        self.apply(_init_weights)
        trunc_normal_(self.cls_token, std=0.02)
        if isinstance(self.head, nn.Linear):
            with torch.no_grad():
                self.head.weight.mul_(head_init_scale)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters, as timm's optimizers ask for them."""
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
        self.head.apply(_init_weights)

    def set_patch_size(self, image_size: int, patch_size: int) -> None:
        """Change the patch size in place, for small images."""
        if isinstance(self.patch_embed, HybridEmbed):
            self.patch_embed.set_patch_size(image_size, patch_size)
        else:
            set_stem_patch_size(cast(ConvPatchEmbed, self.patch_embed), image_size, patch_size)

    def forward_features(self, x: Tensor) -> Tensor:
        """Class token and patch tokens after class attention and norm: (batch, 1 + tokens, channels)."""
        tokens, grid = self.patch_embed(x)
        tokens = tokens + self.pos_embed(1, *grid).flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = checkpoint(block, tokens, grid) if self._recomputes() else block(tokens, grid)
        # len(tokens), not len(x): an instrument may have stacked several streams.
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


def _init_weights(module: nn.Module) -> None:
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


# Arguments of `Fan`. Depths are those of the trained models, which the names of some hybrids do not give.
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
