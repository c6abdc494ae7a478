"""Random noise of a budget's size: what any attack must beat, and what a metric is calibrated by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.wrappers import repeated
from vitadel.backbones.model_checks import check_pixels
from vitadel.errors import UserError, nearest_names
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

__all__ = ["KINDS", "Noise", "noise"]

KINDS = ("uniform", "surface", "gaussian")
"""Anywhere in the ball, as far out as the ball allows (Linf: its corners), or normal and cut to the ball."""


@dataclass(frozen=True)
class Noise:
    """One draw per image; the model is not asked. Gaussian noise has a standard deviation of half the budget."""

    threat: Threat
    kind: str = "uniform"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(
                f"unknown kind of noise {self.kind!r}{nearest_names(self.kind, KINDS) or '.'} Known: {KINDS}"
            )

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        x = x.detach()
        own = (SampleRNG.of_pixels(x) if rng is None else rng).stream("noise")
        if self.kind != "gaussian":
            return self.threat.random(x, own, surface=self.kind == "surface")
        bump = own.normal(*x.shape[1:]).to(x.dtype)
        length = self.threat.size(torch.full_like(x, 1.0), torch.zeros_like(x)).view(-1, *[1] * (x.ndim - 1))
        return self.threat.project(x + 0.5 * self.threat.eps / length.to(x.dtype) * bump, x)

    def passes(self) -> tuple[int, int]:
        return 0, 0


def noise(threat: Threat, kind: str = "uniform", restarts: int = 1) -> Attack:
    return repeated(Noise(threat, kind), restarts)
