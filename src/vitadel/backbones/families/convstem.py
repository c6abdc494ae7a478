"""Backbones with a convolutional stem instead of a patch convolution (Singh et al. 2023, arXiv:2303.01870).

Every 3x3 convolution of the stem is followed by LayerNorm over channels and GELU. The rest of a model is timm's, so a
ViT with this stem has the anatomy of a ViT. The isotropic ConvNeXt (Liu et al. 2022, arXiv:2201.03545), which timm does
not have, keeps one resolution throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import DropPath, LayerNorm2d
from timm.models.convnext import ConvNeXt
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitadel.backbones.timm_models import data_config, register_models

__all__ = ["ConvStem", "IsotropicBlock", "IsotropicConvNeXt", "convnext", "vit"]

_NORM_EPS = 1e-6
_VIT_STEM = ((48, 2), (96, 2), (192, 2), (384, 2))


class ConvStem(nn.Module):
    """3x3 convolutions of the given (width, stride), then a 1x1 convolution to `project` channels if that is given."""

    def __init__(self, layers: Sequence[tuple[int, int]], project: int | None = None, in_chans: int = 3) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for width, stride in layers:
            parts += [nn.Conv2d(in_chans, width, 3, stride, 1), LayerNorm2d(width, eps=_NORM_EPS), nn.GELU()]
            in_chans = width
        if project is not None:
            parts.append(nn.Conv2d(in_chans, project, 1))
        self.stem = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.stem(x)
        return maps


def vit(stem: Sequence[tuple[int, int]] = _VIT_STEM, **settings: Any) -> VisionTransformer:
    """ViT with a convolutional stem (Singh et al. 2023)."""
    model = VisionTransformer(**settings)
    model.patch_embed.proj = ConvStem(stem, model.embed_dim, settings.get("in_chans", 3))
    return model


def convnext(stem: Sequence[tuple[int, int]], **settings: Any) -> ConvNeXt:
    """ConvNeXt with a convolutional stem (Singh et al. 2023)."""
    model = ConvNeXt(**settings)
    model.stem = ConvStem(stem, None, settings.get("in_chans", 3))
    return model


class IsotropicBlock(nn.Module):
    """ConvNeXt block without LayerScale."""

    def __init__(self, width: int, drop_path: float = 0.0) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=_NORM_EPS)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.dwconv(x).permute(0, 2, 3, 1)
        tokens = self.pwconv2(self.act(self.pwconv1(self.norm(tokens))))
        mixed: Tensor = x + self.drop_path(tokens.permute(0, 3, 1, 2))
        return mixed


class IsotropicConvNeXt(nn.Module):
    """Isotropic ConvNeXt with the convolutional stem of the ViTs."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        depth: int = 18,
        embed_dim: int = 384,
        stem: Sequence[tuple[int, int]] = _VIT_STEM,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = embed_dim
        self.stem = ConvStem(stem, embed_dim, in_chans)
        rates = [drop_path_rate * place / max(depth - 1, 1) for place in range(depth)]
        self.blocks = nn.Sequential(*(IsotropicBlock(embed_dim, rate) for rate in rates))
        self.norm = nn.LayerNorm(embed_dim, eps=_NORM_EPS)
        self.head: nn.Module = nn.Identity()
        self.reset_classifier(num_classes)

    def get_classifier(self) -> nn.Module:
        """The classification layer."""
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classification layer by an untrained one; none if there are no classes."""
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.blocks(self.stem(x))
        logits: Tensor = self.head(self.norm(maps.mean((2, 3))))
        return logits


def _widths(width: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"embed_dim": width, "depth": 12, "num_heads": heads, **more}


_VITS = {
    "convstem_vit_small": _widths(384, 6),
    "convstem_vit_medium": _widths(512, 8, no_embed_class=True, init_values=1e-6),
    "convstem_vit_base": _widths(768, 12),
}
_CONVNEXTS: dict[str, dict[str, Any]] = {
    "convstem_convnext_tiny": {"stem": ((48, 2), (96, 2)), "depths": (3, 3, 9, 3), "dims": (96, 192, 384, 768)},
    "convstem_convnext_small": {"stem": ((48, 2), (96, 2)), "depths": (3, 3, 27, 3), "dims": (96, 192, 384, 768)},
    "convstem_convnext_base": {
        "stem": ((64, 2), (96, 2), (128, 1)),
        "depths": (3, 3, 27, 3),
        "dims": (128, 256, 512, 1024),
    },
    "convstem_convnext_large": {
        "stem": ((96, 2), (144, 2), (192, 1)),
        "depths": (3, 3, 27, 3),
        "dims": (192, 384, 768, 1536),
    },
}
_ISOTROPIC: dict[str, dict[str, Any]] = {"convstem_convnext_isotropic_small": {}}

register_models(vit, _VITS, {name: data_config(224, 0.875, first_conv="patch_embed.proj.stem.0") for name in _VITS})
register_models(
    convnext,
    _CONVNEXTS,
    {name: data_config(224, 0.875, classifier="head.fc", first_conv="stem.stem.0") for name in _CONVNEXTS},
)
register_models(IsotropicConvNeXt, _ISOTROPIC, {name: data_config(224, 0.875) for name in _ISOTROPIC})
