"""MeanSparse (Amini et al. 2024, arXiv:2406.05927): an operator in every block of a trained model, added afterwards.

Features within `threshold` standard deviations of their mean over the training images become that mean. The operator
has zero gradient there: its authors' leaderboard entry fell from 62.12 to 58.92 % under an attack that replaces the
backward pass by the identity (BPDA), so AutoAttack alone overestimates these models.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Mlp
from timm.models.convnext import ConvNeXt
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock
from torch import Tensor, nn

from vitadel.backbones.timm_models import data_config, register_models

__all__ = ["MeanSparse", "SparseMlp", "SparseSwinBlock", "convnext", "swin"]


class MeanSparse(nn.Module):
    """Replace features near their mean by it; a threshold of 0 does nothing. Channels are last, or the second."""

    running_mean: Tensor
    running_var: Tensor
    threshold: Tensor

    def __init__(self, width: int, channels_last: bool = True) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("threshold", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        mean, band = self.running_mean, self.threshold * self.running_var.sqrt()
        if not self.channels_last:
            mean, band = mean.view(-1, 1, 1), band.view(-1, 1, 1)
        return torch.where((x - mean).abs() < band, mean, x)


class SparseMlp(Mlp):  # type: ignore[misc]
    """timm's MLP with the operator after each of its two layers."""

    meansparse1: MeanSparse
    meansparse2: MeanSparse

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.drop1(self.act(self.meansparse1(self.fc1(x)))))
        out: Tensor = self.drop2(self.meansparse2(self.fc2(hidden)))
        return out


class SparseSwinBlock(SwinTransformerBlock):  # type: ignore[misc]
    """timm's Swin block with the operator after both of its residual sums."""

    meansparse1: MeanSparse
    meansparse2: MeanSparse

    def forward(self, x: Tensor) -> Tensor:
        x = self.meansparse1(x + self.drop_path1(self._attn(self.norm1(x))))
        out: Tensor = self.meansparse2(x + self.drop_path2(self.mlp(self.norm2(x))))
        return out


def _insert(module: nn.Module, kind: type[nn.Module], first: int, second: int) -> None:
    """Make `module` one of `kind`, which differs in its forward pass and has two operators."""
    module.__class__ = kind
    module.add_module("meansparse1", MeanSparse(first))
    module.add_module("meansparse2", MeanSparse(second))


def swin(**settings: Any) -> SwinTransformer:
    """Swin with MeanSparse operators (Amini et al. 2024)."""
    model = SwinTransformer(**settings)
    for block in [module for module in model.modules() if isinstance(module, SwinTransformerBlock)]:
        _insert(block, SparseSwinBlock, block.dim, block.dim)
        _insert(block.mlp, SparseMlp, block.mlp.fc1.out_features, block.dim)
    return model


def convnext(**settings: Any) -> ConvNeXt:
    """ConvNeXt with MeanSparse operators (Amini et al. 2024)."""
    model = ConvNeXt(**settings)
    for stage in model.stages:
        for block in stage.blocks:
            block.mlp.act = nn.Sequential(MeanSparse(block.mlp.fc1.out_features), block.mlp.act)
            block.drop_path = nn.Sequential(block.drop_path, MeanSparse(block.mlp.fc2.out_features, False))
    return model


_SWINS: dict[str, dict[str, Any]] = {
    "meansparse_swin_large": {
        "embed_dim": 192,
        "depths": (2, 2, 18, 2),
        "num_heads": (6, 12, 24, 48),
        "window_size": 7,
    }
}
_CONVNEXTS: dict[str, dict[str, Any]] = {
    "meansparse_convnext_large": {"depths": (3, 3, 27, 3), "dims": (192, 384, 768, 1536)}
}

register_models(
    swin,
    _SWINS,
    {
        name: data_config(224, 0.875, classifier="head.fc", first_conv="patch_embed.proj", fixed_input_size=True)
        for name in _SWINS
    },
)
register_models(
    convnext,
    _CONVNEXTS,
    {name: data_config(224, 0.875, classifier="head.fc", first_conv="stem.0") for name in _CONVNEXTS},
)
