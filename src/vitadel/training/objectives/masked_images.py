"""MIMIR (Xu et al. 2023, arXiv:2312.04960): adversarial pre-training by masked image modeling."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.adapters.masked_autoencoder import MaskedAutoencoder, find_autoencoder
from vitadel.attacks.per_sample import keep_samples
from vitadel.attacks.pgd import PGD
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.quantities import NOT_NEGATIVE, POSITIVE, check_ranges
from vitadel.training.interfaces import Plugin, Training
from vitadel.types import Aim, Attack

_RIDGE = 1e-5  # of the normalized criterion, times the number of images


@dataclass(frozen=True)
class Mimir:
    """Reconstruct the masked patches of the clean image from the visible ones of the attacked image.

    `attack`, a PGD, maximizes the same error under masks of its own; labels are not used. `penalty` times the
    normalized HSIC of attacked images and what the encoder makes of them is added: it bounds their mutual information.
    `bandwidth` is that of its Gaussian kernels, for distances divided by the root of the number of dimensions.
    """

    measured_as: ClassVar[str] = "explained"
    adapter: ClassVar[str] = "masked_autoencoder"

    attack: Attack
    penalty: float = 1e-5
    bandwidth: float = 5.0

    def __post_init__(self) -> None:
        check_ranges(self, penalty=NOT_NEGATIVE, bandwidth=POSITIVE)
        if not isinstance(self.attack, PGD):
            raise UserError("mimir attacks the reconstruction by PGD: give attack as fgsm, fgsm-rs or pgd-K(step=...)")
        object.__setattr__(self, "attack", replace(self.attack, goal=AwayFromImage()))

    @property
    def companion(self) -> tuple[str, Plugin]:
        return "masks", CountSteps()

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        decoder = find_autoencoder(model).decoder
        with hooked(model, [Edge("decoder", decoder, seen.append, before=True)]):
            error = model(z, x).mean()
        dependence = normalized_hsic(z, seen[0], self.bandwidth)
        loss = error + self.penalty * dependence.to(error.dtype)
        return {"loss": loss, "error": error.detach(), "hsic": dependence.detach()}

    def measure(self, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Per image, the share of the masked patches' variance that is explained, from clean and attacked patches."""
        return 1 - model(x), 1 - model(z, x)


def normalized_hsic(a: Tensor, b: Tensor, bandwidth: float) -> Tensor:
    """How much two descriptions of the same samples depend on each other: 0 if one is constant, at most their number.

    The normalized Hilbert-Schmidt independence criterion (Fukumizu et al. 2007) with Gaussian kernels, as in the HSIC
    bottleneck (Ma et al. 2020, arXiv:1908.01580).
    """
    count = len(a)
    ridge = _RIDGE * count * torch.eye(count, dtype=torch.float64, device=a.device)

    def smoothed(kernel: Tensor) -> Tensor:
        centered = kernel - kernel.mean(0) - kernel.mean(1, keepdim=True) + kernel.mean()
        smooth: Tensor = torch.linalg.solve(centered + ridge, centered)
        return smooth

    first, second = (smoothed(_gaussian(each.flatten(1).double(), bandwidth)) for each in (a, b))
    return (first * second.mT).sum()


def _gaussian(rows: Tensor, bandwidth: float) -> Tensor:
    product = rows @ rows.mT
    norms = product.diagonal()
    distance = (norms[:, None] + norms - 2 * product).clamp(min=0)
    return torch.exp(-distance / (2 * bandwidth**2 * rows.shape[1]))


@dataclass
class CountSteps:
    """Gives the autoencoder the number of steps, so that the same image gets a new mask in every step."""

    def after_step(self, run: Training) -> None:
        find_autoencoder(run.model).step.fill_(run.step)


@dataclass(frozen=True)
class AwayFromImage:
    """The goal of the attack: the error of the clean image's reconstruction."""

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _Reconstruction(find_autoencoder(model), x)


@dataclass(frozen=True)
class _Reconstruction:
    model: MaskedAutoencoder
    x: Tensor

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        return self.model(z, self.x, "mask of the attack"), torch.zeros(len(z), dtype=torch.bool, device=z.device)
