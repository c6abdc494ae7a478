"""What a search maximises: a goal binds model, clean batch and labels once, and then only sees perturbed images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import cross_entropy, kl_divergence, margin, precise
from vitadel.attacks.transfer.surrogate import Surrogate
from vitadel.errors import UserError
from vitadel.types import Aim, Loss

__all__ = ["FromClean", "Gama", "OnLogits", "clearly_fooled", "fooled", "gradient"]

# A sample counts as fooled during a search only beyond float rounding, so that the judge, who sees it in another
# batch, comes to the same verdict.
_ROUNDING = 1e-5


def clearly_fooled(logits: Tensor, y: Tensor) -> Tensor:
    """Misclassified by more than the order of additions can change; a mixed label counts as its likeliest class."""
    rounding = max(_ROUNDING, torch.finfo(logits.dtype).eps)
    return margin(logits, y) > rounding * logits.abs().amax(1)


def fooled(model: nn.Module, z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Whether `z`, where `model` gave `logits`, is adversarial: for a surrogate, the deployed model is asked."""
    if isinstance(model, Surrogate):
        with torch.no_grad():
            logits = model.deployed(z)
    return clearly_fooled(logits.detach(), y)


def gradient(values: Tensor, z: Tensor, again: bool = False) -> Tensor:
    """The gradient of the summed values at `z`; zero where there is none (a constant model), never NaN.

    The sum, not the mean: a batch's size must not scale a sample's gradient. With `again` the graph lives on.
    """
    if not values.requires_grad:
        return torch.zeros_like(z)
    (grad,) = torch.autograd.grad(values.sum(), z, retain_graph=again, allow_unused=True)
    return torch.zeros_like(z) if grad is None else torch.nan_to_num(grad, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class _LogitAim:
    model: nn.Module
    y: Tensor
    loss: Loss

    def look(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        return self.loss(logits, self.y), fooled(self.model, z, logits, self.y)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, y=self.y[chosen])


@dataclass(frozen=True)
class OnLogits:
    """Maximise a loss of the logits at the true label."""

    loss: Loss = cross_entropy

    @property
    def forwards(self) -> int:
        return 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _LogitAim(model, y, self.loss)


@dataclass(frozen=True)
class _FromCleanAim:
    model: nn.Module
    y: Tensor
    clean: Tensor  # logits

    def look(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        return kl_divergence(self.clean, logits), fooled(self.model, z, logits, self.y)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, y=self.y[chosen], clean=self.clean[chosen])


@dataclass(frozen=True)
class FromClean:
    """Maximise KL(p(x) || p(z)), as inside TRADES (Zhang et al. 2019, arXiv:1901.08573).

    p(x) is computed once. At z = x the divergence is at its minimum, without a slope: start elsewhere.
    """

    @property
    def forwards(self) -> int:
        return 1

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        with torch.no_grad():
            return _FromCleanAim(model, y, model(x))


@dataclass
class _GamaAim:
    model: nn.Module
    y: Tensor
    guide: Tensor | None  # None until the first look, which then is the guide
    weight: float
    until: float

    def look(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        probabilities = precise(logits).softmax(1)
        if self.guide is None:
            self.guide = probabilities.detach()
        pull = self.weight * max(0.0, 1 - progress / self.until)
        away = (probabilities - self.guide).square().sum(1)
        return margin(probabilities, self.y) + pull * away, fooled(self.model, z, logits, self.y)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, y=self.y[chosen], guide=None if self.guide is None else self.guide[chosen])


@dataclass(frozen=True)
class Gama:
    """Guided adversarial margin attack (Sriramanan et al. 2020, arXiv:2011.14969): margin of the probabilities plus a
    pull away from the guide's, whose weight falls linearly to zero at `until` of the way.

    The guide is the `clean` image, as in the paper, or the noisy start (`init`), as in the released code, where the
    pull has no gradient at the first step.
    """

    weight: float = 50.0
    until: float = 0.25
    guide: str = "clean"

    def __post_init__(self) -> None:
        if self.guide not in ("clean", "init"):
            raise UserError(f"unknown guide {self.guide!r} of GAMA; allowed: clean, init")
        if not 0 < self.until <= 1:
            raise UserError(
                f"until is the share of GAMA's steps after which nothing pulls, above 0 and at most 1, got "
                f"{self.until:g}; the paper has 0.25"
            )

    @property
    def forwards(self) -> int:
        return int(self.guide == "clean")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        if self.guide == "init":
            return _GamaAim(model, y, None, self.weight, self.until)
        with torch.no_grad():
            guide = precise(model(x)).softmax(1)
        return _GamaAim(model, y, guide, self.weight, self.until)
