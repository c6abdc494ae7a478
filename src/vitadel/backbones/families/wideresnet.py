"""Wide residual networks for images of 32 pixels (Zagoruyko & Komodakis 2016, arXiv:1605.07146).

The usual CNN of papers on adversarial training; AAS compares its scaled logits with a ViT's scaled attention.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from vitadel.backbones.timm_models import data_config, register_models

__all__ = ["WideBlock", "WideResNet"]

_STAGES = 3


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after BatchNorm and ReLU, beside a shortcut."""

    def __init__(self, width: int, out: int, stride: int, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(out)
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.drop = nn.Dropout(drop)
        self.shortcut = nn.Conv2d(width, out, 1, stride, bias=False) if (width, stride) != (out, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        start: Tensor = F.relu(self.norm1(x))
        maps: Tensor = self.conv2(self.drop(F.relu(self.norm2(self.conv1(start)))))
        return maps + (x if self.shortcut is None else self.shortcut(start))


class WideResNet(nn.Module):
    """Wide residual network for small images (Zagoruyko & Komodakis 2016)."""

    def __init__(
        self,
        depth: int = 28,
        widen: int = 10,
        num_classes: int = 10,
        in_chans: int = 3,
        drop_rate: float = 0.0,
        img_size: int = 32,
    ) -> None:
        """`img_size` is only recorded: any size works."""
        super().__init__()
        if (depth - 4) % 6 or depth < 10:
            raise ValueError(f"depth must be 6 n + 4, such as 28, got {depth}")
        self.num_classes = num_classes
        width, blocks = 16, []
        self.stem = nn.Conv2d(in_chans, width, 3, 1, 1, bias=False)
        for stage in range(_STAGES):
            out = 16 * 2**stage * widen
            for place in range((depth - 4) // 6):
                blocks.append(WideBlock(width, out, 2 if stage and place == 0 else 1, drop_rate))
                width = out
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width)
        self.num_features = width
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        maps = F.relu(self.norm(self.blocks(self.stem(x))))
        logits: Tensor = self.head(maps.mean((2, 3)))
        return logits


_SIZES = {"wideresnet_28_10": (28, 10), "wideresnet_34_10": (34, 10)}
register_models(
    WideResNet,
    {name: {"depth": depth, "widen": widen} for name, (depth, widen) in _SIZES.items()},
    {name: data_config(32, num_classes=10, first_conv="stem") for name in _SIZES},
)
