"""A linear model of two opposite patterns and images of them: attacks on it, and climbs, have closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitadel.backbones.classifier import wrap
from vitadel.runtime.rng import SampleRNG

__all__ = ["GRAY", "SIDE", "Faint", "Patterned", "pattern", "patterned"]

SIDE, GRAY = 8, 128


def pattern() -> Tensor:
    return SampleRNG.of_samples(3, [0]).signs(3, SIDE, SIDE)[0]


class Patterned(nn.Module):
    """Class 0 is the pattern, class 1 its opposite."""

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(strength * torch.stack([pattern(), -pattern()]).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - GRAY / 255).flatten(1) @ self.weight.T


def patterned(strength: float = 1.0) -> nn.Module:
    return wrap(Patterned(strength), mean=(0.0,) * 3, std=(1.0,) * 3)


class Faint:
    """Patterns of the two classes in turn; of each four images two are `levels[0]` gray levels strong."""

    classes: Sequence[str] = ("pattern", "opposite")

    def __init__(self, count: int = 8, levels: tuple[int, int] = (3, 20)) -> None:
        self.count, self.levels = count, levels

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return "faint patterns"

    def labels(self) -> Tensor:
        return torch.arange(self.count) % 2

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        return [self._image(index) for index in indices]

    def _image(self, index: int) -> Image.Image:
        sign, level = 1 - 2 * (index % 2), self.levels[index // 2 % 2]
        pixels = GRAY + sign * level * pattern().permute(1, 2, 0).numpy()
        return Image.fromarray(pixels.astype(np.uint8))

    def name(self, index: int) -> str:
        return f"image {index}"
