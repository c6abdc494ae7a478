"""A student of a model's answers: a small convolutional network to transfer attacks from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import kl_divergence
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG

__all__ = ["taught"]

_RATE = 3e-3


def taught(
    teacher: nn.Module, lessons: Sequence[tuple[Tensor, Tensor]], epochs: int, seed: int = 0, *, at_once: int = 64
) -> nn.Module:
    """Trained on batches of images to give the teacher's probabilities (Hinton et al. 2015); labels are not used.

    The teacher is asked about so many images `at_once`.
    """
    with frozen(teacher), torch.no_grad():
        answers = [torch.cat([teacher(part) for part in x.split(at_once)]) for x, _ in lessons]
    first = lessons[0][0]
    student = _network(answers[0].shape[1], first.shape[1], first.shape[-1], seed).to(first.device)
    optimizer = torch.optim.AdamW(student.parameters(), _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(lessons))
    with torch.enable_grad():
        for _ in range(epochs):
            for (x, _), answer in zip(lessons, answers, strict=True):
                optimizer.zero_grad()
                kl_divergence(answer, student(x)).mean().backward()
                optimizer.step()
                schedule.step()
    return student.eval().requires_grad_(False)


def _network(classes: int, channels: int, side: int, seed: int) -> nn.Module:
    stride = max(1, side // 32)  # large images are looked at coarsely
    with torch.random.fork_rng():  # layers draw their first weights, which are replaced below
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
        bumps = SampleRNG.of_samples(seed, range(len(weight))).stream("student", number).normal(*weight.shape[1:])
        weight.data = bumps * (2 / fan) ** 0.5 if weight.ndim > 1 else torch.zeros_like(weight)
    return student
