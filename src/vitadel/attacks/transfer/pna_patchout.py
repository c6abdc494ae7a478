"""PNA and PatchOut (Wei et al., AAAI 2022, arXiv:2109.04176): adversarial images that transfer between ViTs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import deployed, deployed_fooled
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.per_sample import keep_samples, takes_arrays
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.attention import constant_attention
from vitadel.instrument.tokens import patch_grid
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Threat

_SHARE = 130 / 196  # 130 of the 14 x 14 patches of a ViT with patches of 16 pixels


@dataclass(frozen=True)
class _PatchAim:
    model: nn.Module
    x: Tensor
    y: Tensor
    rng: SampleRNG
    grid: tuple[int, int] | None
    share: float
    weight: float
    verdicts: bool

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(self._shown(z, progress))
        length = torch.linalg.vector_norm((z - self.x).flatten(1), dim=1)
        return cross_entropy(logits, self.y) + self.weight * length, self._fooled(z)

    def _shown(self, z: Tensor, progress: float) -> Tensor:
        """`z` in random patches, the clean image elsewhere."""
        if self.grid is None:
            return z
        rows, columns = self.grid
        count = max(1, round(self.share * rows * columns))
        # Keyed by progress, so that the goal needs neither a counter nor the number of steps.
        order = self.rng.stream("patchout", round(progress * 2**32)).permutation(rows * columns)
        chosen = torch.zeros_like(order, dtype=torch.bool).scatter(1, order[:, :count], True).view(-1, rows, columns)
        height, width = z.shape[-2:]
        row = torch.arange(height, device=z.device) * rows // height
        column = torch.arange(width, device=z.device) * columns // width
        return torch.where(chosen[:, row][:, :, column].unsqueeze(1), z, self.x)

    def _fooled(self, z: Tensor) -> Tensor:
        """The verdict on the whole image, not on the input of the loss."""
        if not self.verdicts:
            return torch.zeros_like(self.y, dtype=torch.bool)
        return deployed_fooled(self.model, z, self.y)


@dataclass(frozen=True)
class PatchOut:
    """Cross-entropy with only a random `share` of the patches perturbed in each step, plus `weight` times the
    perturbation's L2 length, which lets the other patches grow.

    The goal holds the random numbers of one batch. Patches and lengths are per sample, not per batch as in the released
    code. A share of 1 works on any model. Without `verdicts` no sample counts as fooled, which saves a pass.
    """

    rng: SampleRNG
    share: float = _SHARE
    weight: float = 0.1
    verdicts: bool = True

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        grid = patch_grid(deployed(model), x) if self.share < 1 else None
        return _PatchAim(model, x, y, self.rng, grid, self.share, self.weight, self.verdicts)


@dataclass(frozen=True)
class PnaPatchOut:
    """MI-FGSM on PatchOut's goal with gradients that skip the attention maps (PNA).

    For transfer it does not stop when the model is fooled, unless `stop_when_fooled`, and returns the last iterate.
    `decay` 0 is the plain variant, 1 the one with momentum; the default `length` is eps / steps. The whole search runs
    inside `constant_attention`, so that gradient checkpointing recomputes the same passes; the model's outputs, and so
    the verdicts, do not change.
    """

    threat: Threat
    steps: int = 10
    decay: float = 0.0
    length: float | None = None
    share: float = _SHARE
    weight: float = 0.1
    pna: bool = True
    patchout: bool = True
    stop_when_fooled: bool = False

    def __post_init__(self) -> None:
        Momentum(self.decay)  # checks the decay
        if not 0 < self.share <= 1:
            raise UserError(
                f"share is the part of the patches perturbed in each step, above 0 and at most 1, got {self.share}"
            )
        if not self.patchout and self.share != _SHARE:
            raise UserError(f"share={self.share:g} has no effect without PatchOut; leave share or patchout=false out")

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        goal = PatchOut(rng, self.share if self.patchout else 1.0, self.weight, verdicts=self.stop_when_fooled)
        stepper = Momentum(self.decay, self.length)
        search = PGD(self.threat, goal, stepper, self.steps, random_start=False, stop_when_fooled=self.stop_when_fooled)
        with constant_attention(deployed(model)) if self.pna else nullcontext():
            return search(model, x, y, rng)

    def passes(self) -> tuple[int, int]:
        return self.steps, self.steps if self.stop_when_fooled else 0
