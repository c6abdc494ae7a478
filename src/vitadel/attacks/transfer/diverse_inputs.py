"""Diverse inputs with momentum (DI-MI-FGSM, Xie et al., CVPR 2019, arXiv:1803.06978), for transfer to other models.

At every step the model sees the image randomly shrunk and shifted and, optionally, with additional random tokens. What
fools it under these changes depends less on this particular model.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.goals import deployed_fooled
from vitadel.attacks.losses import cross_entropy, margin
from vitadel.attacks.per_sample import keep_samples, takes_arrays
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError, check_known
from vitadel.instrument.tokens import extra_tokens, token_width
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Loss, Threat

LOSSES: dict[str, Loss] = {"ce": cross_entropy, "margin": margin}


def shrunk(z: Tensor, size: Tensor, corner: Tensor) -> Tensor:
    """Each image at `size` times its width and height on black; `corner` (x, y) in [0, 1] is its relative position.

    Bilinear and differentiable; a size of 1 gives the image itself up to rounding.
    """
    if len(z) == 0:
        return z  # torch's grid_sample refuses an empty batch
    scale = 1 / size
    # Output coordinates run from -1 to 1; the small image covers 2 * size of them.
    shift = scale[:, None] * (1 - size[:, None]) * (1 - 2 * corner)
    theta = torch.zeros(len(z), 2, 3, dtype=z.dtype, device=z.device)
    theta[:, 0, 0], theta[:, 1, 1], theta[:, :, 2] = scale, scale, shift
    grid = F.affine_grid(theta, list(z.shape), align_corners=False)
    return F.grid_sample(z, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


@dataclass(frozen=True)
class _DiverseAim:
    model: nn.Module
    y: Tensor
    rng: SampleRNG
    attack: Diverse

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        # Keyed by progress, so that the goal needs neither a counter nor the number of steps.
        now = self.rng.stream("diverse", round(progress * 2**32))
        with self._random_tokens(now):
            logits = self.model(self._shown(z, now))
        return LOSSES[self.attack.loss](logits, self.y), self._fooled(z)

    def _shown(self, z: Tensor, now: SampleRNG) -> Tensor:
        chance, size = now.stream("chance").uniform(), now.stream("size").uniform()
        full = chance >= self.attack.probability
        size = torch.where(full, torch.ones_like(size), self.attack.smallest + (1 - self.attack.smallest) * size)
        small = shrunk(z, size.to(z.dtype), now.stream("corner").uniform(2).to(z.dtype))
        return torch.where(full.view(-1, 1, 1, 1), z, small)

    def _random_tokens(self, now: SampleRNG) -> AbstractContextManager[None]:
        if self.attack.tokens == 0:
            return nullcontext()
        width = token_width(self.model)
        tokens = self.attack.scale * now.stream("tokens").normal(self.attack.tokens, width)
        return extra_tokens(self.model, tokens)

    def _fooled(self, z: Tensor) -> Tensor:
        """The verdict on the image itself, not on the input of the loss."""
        if not self.attack.stop_when_fooled:
            return torch.zeros(len(z), dtype=torch.bool, device=z.device)
        return deployed_fooled(self.model, z, self.y)


@dataclass(frozen=True)
class _DiverseGoal:
    rng: SampleRNG
    attack: Diverse
    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _DiverseAim(model, y, self.rng, self.attack)


@dataclass(frozen=True)
class Diverse:
    """MI-FGSM on diverse inputs: with `probability` an image is shrunk to between `smallest` and 1 of its size.

    `tokens` is the number of additional random tokens of size `scale`, new ones for each image and step. For transfer
    it does not stop when the model is fooled, unless `stop_when_fooled`, and returns the last iterate. The default
    `length` is eps / steps.
    """

    threat: Threat
    steps: int = 10
    decay: float = 1.0
    length: float | None = None
    loss: str = "margin"
    probability: float = 0.7
    smallest: float = 0.9
    tokens: int = 0
    scale: float = 0.01
    stop_when_fooled: bool = False

    def __post_init__(self) -> None:
        check_known("loss", self.loss, LOSSES)
        for name, value, allowed in (("probability", self.probability, 0.0), ("smallest", self.smallest, 0.1)):
            if not allowed <= value <= 1:
                raise UserError(f"{name} must be from {allowed:g} to 1, got {value:g}")
        Momentum(self.decay)  # checks the decay
        if self.tokens < 0:
            raise UserError(f"tokens is the number of additional random tokens, 0 or more; got {self.tokens}")

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        goal, stepper = _DiverseGoal(rng, self), Momentum(self.decay, self.length)
        search = PGD(self.threat, goal, stepper, self.steps, random_start=False, stop_when_fooled=self.stop_when_fooled)
        return search(model, x, y, rng)

    def passes(self) -> tuple[int, int]:
        return self.steps, self.steps if self.stop_when_fooled else 0
