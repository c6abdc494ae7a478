"""Random noise of the size of a budget: the baseline that every attack must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.per_sample import per_sample, takes_arrays
from vitadel.attacks.wrappers import with_restarts
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import unknown_name
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

KINDS = ("uniform", "surface", "gaussian")
"""Anywhere in the ball, on its surface (Linf: its corners), or normal noise projected to the ball."""


@dataclass(frozen=True)
class Noise:
    """One random draw per image, without a pass of the model. Gaussian noise has a standard deviation of eps / 2."""

    threat: Threat
    kind: str = "uniform"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind of noise", self.kind, KINDS)

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        x = x.detach()
        own = (SampleRNG.of_pixels(x) if rng is None else rng).stream("noise")
        if self.kind != "gaussian":
            return self.threat.random(x, own, surface=self.kind == "surface")
        noise = own.normal(*x.shape[1:]).to(x.dtype)
        unit = per_sample(self.threat.size(torch.ones_like(x), torch.zeros_like(x)), x)
        return self.threat.project(x + 0.5 * self.threat.eps / unit * noise, x)

    def passes(self) -> tuple[int, int]:
        return 0, 0


def noise(threat: Threat, kind: str = "uniform", restarts: int = 1) -> Attack:
    return with_restarts(Noise(threat, kind), restarts)
