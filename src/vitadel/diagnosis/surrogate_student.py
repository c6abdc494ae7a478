"""A student of a model's outputs: a small convolutional network to transfer attacks from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import kl_divergence
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG

__all__ = ["train_student"]

_RATE = 3e-3


def train_student(
    teacher: nn.Module, data: Sequence[tuple[Tensor, Tensor]], epochs: int, seed: int = 0, *, batch_size: int = 64
) -> nn.Module:
    """Train on batches of images to give the teacher's probabilities (Hinton et al. 2015); labels are not used.

    `batch_size` is that of the teacher.
    """
    with frozen(teacher), torch.no_grad():
        targets = [torch.cat([teacher(part) for part in x.split(batch_size)]) for x, _ in data]
    first = data[0][0]
    student = _network(targets[0].shape[1], first.shape[1], first.shape[-1], seed).to(first.device)
    optimizer = torch.optim.AdamW(student.parameters(), _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(data))
    with torch.enable_grad():
        for _ in range(epochs):
            for (x, _), target in zip(data, targets, strict=True):
                optimizer.zero_grad()
                kl_divergence(target, student(x)).mean().backward()
                optimizer.step()
                schedule.step()
    return student.eval().requires_grad_(False)


def _network(classes: int, channels: int, side: int, seed: int) -> nn.Module:
    stride = max(1, side // 32)  # large images are processed coarsely
    with torch.random.fork_rng():  # layers draw initial weights, which are replaced below
        student = nn.Sequential(
            nn.Conv2d(channels, 32, 4 * stride, 2 * stride, stride),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, 2, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(8),
            nn.Flatten(),
            nn.Linear(64 * 64, classes),
        )
    for number, weight in enumerate(student.parameters()):
        fan = max(1, weight[0].numel())
        noise = SampleRNG.of_samples(seed, range(len(weight))).stream("student", number).normal(*weight.shape[1:])
        weight.data = noise * (2 / fan) ** 0.5 if weight.ndim > 1 else torch.zeros_like(weight)
    return student
