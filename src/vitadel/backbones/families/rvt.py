"""RVT, the robust vision transformer (Mao et al., CVPR 2022, arXiv:2105.07926), registered with timm.

There is no class token and no position embedding: positions come from the convolutional stem, the depthwise convolution
in the feed-forward part and, in the `plus` models (RVT* in the paper), from learned factors on the attention scores.
Models whose names end in `_32` are for images of 32 pixels: their stem makes patches of 4 pixels instead of 16. These
and `micro`, which is small enough to train on a CPU, are not in the paper.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from timm.layers import DropPath, Mlp, use_fused_attn
from torch import Tensor, nn

from vitadel.backbones.timm_models import data_config, register_models
from vitadel.errors import UserError

__all__ = ["RVT", "VARIANTS", "Attention", "ConvFeedForward", "Stem"]

Grid = tuple[int, int]
ScalingStart = Literal["open", "paper"]

_OPEN = 2.0  # sigmoid(2) = 0.88
_PATCHES = (4, 8, 16)
_NORM_EPS = 1e-6


class Stem(nn.Module):
    """Convolution, batch norm, max-pooling and a patch convolution, with no activation between them.

    Patches of 16 pixels are as in the paper. For smaller ones the first convolution has stride 1 and a smaller kernel,
    which would otherwise cover a fifth of a small image; the patch convolution takes the rest of the patch size.
    """

    needs_whole_patches = True

    def __init__(self, patch_size: int, in_chans: int, width: int) -> None:
        super().__init__()
        if patch_size not in _PATCHES:
            raise UserError(f"the RVT stem cannot make patches of {patch_size} pixels. Known: 4, 8 and 16.")
        self.patch_size = patch_size
        stride = 2 if patch_size == 16 else 1
        last = patch_size // (2 * stride)
        self.conv = nn.Conv2d(in_chans, 32, 7, 2, 2) if stride == 2 else nn.Conv2d(in_chans, 32, 3, 1, 1)
        self.bn = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.proj = nn.Conv2d(32, width, last, last)

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        maps: Tensor = self.proj(self.pool(self.bn(self.conv(x))))
        return _tokens(maps), (maps.shape[2], maps.shape[3])


class Attention(nn.Module):
    """Self-attention, with a learned factor between 0 and 1 on every score if a `grid` is given.

    Position-aware attention scaling: softmax(q k^T / sqrt(d) * sigmoid(W)) v, one W per head and pair of positions.
    `start` is the initial W. 'open': sigmoid(W) = 0.88, close to plain attention, so that weights of a model without
    factors can be fine-tuned, with a useful gradient of the sigmoid. 'paper': about 0, which halves every score; the
    paper's training also decays W towards 0 (`RVT.no_weight_decay`).
    """

    def __init__(self, width: int, num_heads: int, grid: Grid | None = None, start: ScalingStart = "open") -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (width // num_heads) ** -0.5
        self.fused_attn = use_fused_attn()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.grid = grid
        self.position_scores = None if grid is None else nn.Parameter(_first_scores(num_heads, grid, start))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.position_scores is None and self.fused_attn:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q * self.scale @ k.mT
            if self.position_scores is not None:  # fused attention can add to scores, but not multiply them
                scores = scores * self._scores_on(grid).sigmoid()
            mixed = scores.softmax(-1) @ v
        return cast(Tensor, self.proj(mixed.transpose(1, 2).flatten(2)))

    def set_grid(self, grid: Grid) -> None:
        """Resample the learned scores, if there are any, permanently."""
        if self.position_scores is not None and grid != self.grid:
            learns = self.position_scores.requires_grad
            self.position_scores = nn.Parameter(self._scores_on(grid).detach(), requires_grad=learns)
            self.grid = grid

    def _scores_on(self, grid: Grid) -> Tensor:
        """Bicubic over the positions of queries, then of keys; both are grids in row-major order."""
        assert self.position_scores is not None
        assert self.grid is not None
        scores: Tensor = self.position_scores
        if grid == self.grid:
            return scores
        for _ in range(2):
            scores = F.interpolate(scores.unflatten(2, self.grid), grid, mode="bicubic").flatten(2).mT
        return scores.contiguous()


def _first_scores(num_heads: int, grid: Grid, start: ScalingStart) -> Tensor:
    places = grid[0] * grid[1]
    if start == "open":
        return torch.full((num_heads, places, places), _OPEN)
    if start == "paper":
        return nn.init.trunc_normal_(torch.empty(num_heads, places, places), std=0.02)
    raise UserError(f"unknown scaling_start '{start}'. Known: open, paper.")


class ConvFeedForward(nn.Module):
    """The feed-forward part on the map of tokens, with a depthwise 3 x 3 convolution between its two layers."""

    def __init__(self, width: int, ratio: int = 4) -> None:
        super().__init__()
        hidden = ratio * width
        self.expand = nn.Sequential(nn.Conv2d(width, hidden, 1), nn.BatchNorm2d(hidden), nn.GELU())
        self.mix = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden), nn.BatchNorm2d(hidden), nn.GELU()
        )
        self.reduce = nn.Sequential(nn.Conv2d(hidden, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return _tokens(self.reduce(self.mix(self.expand(_map(x, grid)))))


class Block(nn.Module):
    def __init__(self, attention: Attention, width: int, conv_ffn: bool, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.attn = attention
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=_NORM_EPS)
        self.mlp: nn.Module = ConvFeedForward(width) if conv_ffn else Mlp(width, 4 * width)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        y = self.norm2(x)
        return x + cast(
            Tensor, self.drop_path2(self.mlp(y, grid) if isinstance(self.mlp, ConvFeedForward) else self.mlp(y))
        )


class Stage(nn.Module):
    """Blocks of one width. `before` is the width of the previous stage, whose token map is halved on entry."""

    def __init__(self, before: int | None, width: int, blocks: list[Block]) -> None:
        super().__init__()
        self.pool = None if before is None else nn.Conv2d(before, width, 3, 2, 1, groups=before)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        if self.pool is not None:
            x, grid = _tokens(self.pool(_map(x, grid))), _halved(grid)
        for block in self.blocks:
            x = block(x, grid)
        return x, grid


def _halved(grid: Grid) -> Grid:
    return (grid[0] + 1) // 2, (grid[1] + 1) // 2


def _map(tokens: Tensor, grid: Grid) -> Tensor:
    """(batch, channels, rows, columns), with channels last in memory: no copy, and fast convolutions."""
    return cast(Tensor, tokens.transpose(1, 2).unflatten(2, grid))


def _tokens(maps: Tensor) -> Tensor:
    return maps.flatten(2).transpose(1, 2)


class RVT(nn.Module):
    """The robust vision transformer (Mao et al., CVPR 2022).

    `depths`, `widths` and `heads` are those of its stages. The first `scaled_blocks` blocks, over all stages, scale
    attention by position. Their learned scores start by `scaling_start` (see `Attention`), have the size for `img_size`
    and are resampled for other images, whose height and width may be any multiples of the patch size. With
    `scaling_start` 'paper' the scores start and decay as in the published training.
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        widths: tuple[int, ...],
        heads: tuple[int, ...],
        conv_ffn: bool = True,
        scaled_blocks: int = 0,
        scaling_start: ScalingStart = "open",
        img_size: int | Grid = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        total = sum(depths)
        if not 0 <= scaled_blocks <= total:
            raise UserError(f"scaled_blocks must be from 0 to {total}, the number of blocks, got {scaled_blocks}.")
        if not len(depths) == len(widths) == len(heads) or any(w % h for w, h in zip(widths, heads, strict=True)):
            raise UserError(
                f"depths {depths}, widths {widths} and heads {heads} must have one number per stage, each width "
                "a multiple of its heads."
            )
        self.num_classes = num_classes
        self.scaling_start = scaling_start
        self.num_features = self.embed_dim = self.head_hidden_size = widths[-1]
        self.patch_embed = Stem(patch_size, in_chans, widths[0])
        grid, stages, place = _grid_of(img_size, patch_size), [], 0
        self.feature_info = []
        for number, (depth, width, count) in enumerate(zip(depths, widths, heads, strict=True)):
            blocks = []
            for _ in range(depth):
                attention = Attention(width, count, grid if place < scaled_blocks else None, scaling_start)
                # The last block gets slightly less than the full rate.
                blocks.append(Block(attention, width, conv_ffn, drop_path_rate * place / total))
                place += 1
            stages.append(Stage(widths[number - 1] if number else None, width, blocks))
            self.feature_info.append(
                {"num_chs": width, "reduction": patch_size * 2**number, "module": f"stages.{number}"}
            )
            grid = _halved(grid)
        self.stages = nn.ModuleList(stages)
        self.norm = nn.Identity()  # the norm comes after pooling; timm's transformers have both names
        self.fc_norm = nn.LayerNorm(widths[-1], eps=_NORM_EPS)
        self.global_pool = global_pool
        self.reset_classifier(num_classes, global_pool)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens of the last block, (batch, tokens, width)."""
        tokens, grid = self.patch_embed(x)
        for stage in self.stages:
            tokens, grid = stage(tokens, grid)
        return cast(Tensor, self.norm(tokens))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.fc_norm(x.mean(1) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh head; none for 0 classes."""
        if global_pool not in (None, "avg", ""):
            raise UserError(
                f"RVT has no class token: global_pool must be 'avg' (or '', for none), got '{global_pool}'."
            )
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.num_classes = num_classes
        like = self.fc_norm.weight
        self.head = nn.Linear(self.num_features, num_classes).to(like) if num_classes else nn.Identity()

    def set_input_size(self, img_size: int | Grid) -> None:
        """Resample the learned scores for another image size; otherwise every pass resamples them."""
        grid = _grid_of(img_size, self.patch_embed.patch_size)
        for number, stage in enumerate(self.stages):
            grid = _halved(grid) if number else grid
            for block in cast(Stage, stage).blocks:
                cast(Block, block).attn.set_grid(grid)

    def no_weight_decay(self) -> set[str]:
        """Learned scores, whose decay to 0 would halve attention scores; with `scaling_start` 'paper' they decay."""
        if self.scaling_start == "paper":
            return set()
        return {name for name, _ in self.named_parameters() if name.endswith("position_scores")}


def _grid_of(img_size: int | Grid, patch_size: int) -> Grid:
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if min(height, width) < patch_size:
        raise UserError(f"images of {height} x {width} pixels hold no patch of {patch_size}. Give larger ones.")
    return height // patch_size, width // patch_size


# Arguments of `RVT` by name.
_TINY: dict[str, Any] = {"depths": (10, 2), "widths": (192, 384), "heads": (6, 12)}
_SMALL: dict[str, Any] = {"depths": (12,), "widths": (384,), "heads": (6,)}
_BASE: dict[str, Any] = {
    "depths": (12,),
    "widths": (768,),
    "heads": (12,),
    "conv_ffn": False,
}  # as in the released code
_MICRO: dict[str, Any] = {"depths": (6,), "widths": (128,), "heads": (4,)}
_FOR_32 = {"img_size": 32, "patch_size": 4}

_FOR_224 = {
    "rvt_tiny": _TINY,
    "rvt_small": _SMALL,
    "rvt_base": _BASE,
    "rvt_tiny_plus": _TINY | {"scaled_blocks": 10},
    "rvt_small_plus": _SMALL | {"scaled_blocks": 5},
    "rvt_base_plus": _BASE | {"scaled_blocks": 5},
}
VARIANTS = {
    **_FOR_224,
    **{f"{name}_32": settings | _FOR_32 for name, settings in _FOR_224.items()},
    "rvt_micro_32": _MICRO | _FOR_32,
    "rvt_micro_plus_32": _MICRO | _FOR_32 | {"scaled_blocks": 6},
}
_CONFIG_224, _CONFIG_32 = (
    data_config(side, crop_pct, first_conv="patch_embed.conv") for side, crop_pct in ((224, 0.875), (32, 1.0))
)
register_models(RVT, VARIANTS, {name: _CONFIG_32 if name.endswith("_32") else _CONFIG_224 for name in VARIANTS})
