"""Models whose behavior is known in advance."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitadel.runtime.rng import SampleRNG

__all__ = ["Constant", "TinyNet", "images", "trained_toy"]


class Constant(nn.Module):
    """The same logits for every image: no gradient at all."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 3, dtype=self.features(x).dtype)


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
    x = SampleRNG.of_samples(seed, range(count)).stream("toy images").uniform(3, side, side)
    return (x * 1.2 - 0.1).clamp(0, 1)


def trained_toy() -> tuple[nn.Module, Tensor, Tensor]:
    """Four noisy patterns and a small network that has learned them."""
    pattern = SampleRNG.of_samples(5, range(4)).signs(3, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    y = torch.arange(600) % 4
    x = (0.5 + 0.07 * pattern[y] + 0.2 * SampleRNG.of_samples(6, range(600)).normal(3, 8, 8)).clamp(0, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 24), nn.Tanh(), nn.Linear(24, 4))
    for number, weight in enumerate(model.parameters()):
        scale = 0.1 if weight.ndim == 2 else 0.0
        weight.data = scale * SampleRNG.of_samples(number, range(len(weight))).normal(*weight.shape[1:])
    optimizer = torch.optim.Adam(model.parameters(), 0.005)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:400]), y[:400]).backward()
        optimizer.step()
    return model.eval(), x[400:], y[400:]


class BrightnessThreshold(nn.Module):
    """Class 1 if the mean pixel is above a half; with `rough`, the logits are not linear in it."""

    def __init__(self, rough: float = 0.0) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(0.5))
        self.rough = rough

    def forward(self, x: Tensor) -> Tensor:
        gap = x.mean((1, 2, 3)) - self.at
        gap = gap + self.rough * gap**3
        return torch.stack([-gap, gap], 1)


def bright_images(count: int) -> tuple[Tensor, Tensor]:
    """Images of one brightness each, from 0.3 to 0.7: in Linf a `BrightnessThreshold` is as far as that is from 0.5."""
    bright = 0.3 + 0.4 * torch.rand(count, generator=torch.Generator().manual_seed(0))
    return bright[:, None, None, None].expand(count, 3, 4, 4).contiguous(), (bright > 0.5).long()
