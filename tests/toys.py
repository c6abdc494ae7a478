"""Models whose behaviour is known in advance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitadel.runtime.draws import Draws

__all__ = ["Constant", "TinyNet", "images"]


class Constant(nn.Module):
    """The same logits for every image: no gradient at all."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 3, dtype=x.dtype)


class TinyNet(nn.Module):
    """A smooth nonlinear classifier with dropout and batch norm, so that mode and buffers have something to lose."""

    def __init__(self, classes: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(classes)
        )
        generator = torch.Generator().manual_seed(seed)
        self.features(torch.zeros(2, 3, 8, 8))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
        self.features[1].reset_running_stats()

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def images(count: int, seed: int = 0, side: int = 8) -> Tensor:
    """Random pixels, with some at exactly 0 and 1."""
    x = Draws.of_samples(seed, range(count)).stream("toy images").uniform(3, side, side)
    return (x * 1.2 - 0.1).clamp(0, 1)
