"""Goals: what a search maximizes. A goal binds model, clean images and labels; the search only sees values.

The model may be one that only the attacker sees: gradients come from a changed model, verdicts from the deployed one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import cross_entropy, kl_divergence, margin, precise
from vitadel.attacks.per_sample import keep_samples
from vitadel.errors import UserError, check_known
from vitadel.types import Aim, Loss

__all__ = ["FromClean", "Gama", "LogitAim", "OnLogits", "clearly_fooled", "deployed_fooled", "fooled", "gradient"]

# A sample counts as fooled during a search only by more than float rounding, so that the judge, which sees it in
# another batch, gives the same verdict.
_ROUNDING = 1e-5

Change = Callable[[nn.Module], AbstractContextManager[object]]
"""A `with` block around each forward pass of a model."""


class Changed(nn.Module):
    """A model that runs inside `change`, as a model of its own: its own logits decide who is fooled."""

    def __init__(self, model: nn.Module, change: Change) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with self.change(self.model):
            logits: Tensor = self.model(x)
        return logits


class View(nn.Module):
    """A model with other logits: `read(model, x)` computes them from passes of the model."""

    def __init__(self, model: nn.Module, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.model, x)


def changed(model: nn.Module, change: Change) -> nn.Module:
    """`model` run inside `change`. Inside a view the viewed model is changed, since a view may run it several times."""
    return View(changed(model.model, change), model.read) if isinstance(model, View) else Changed(model, change)


class Surrogate(nn.Module):
    """Attacks follow the gradients of `shown`, but `goals.fooled` and the judge ask `deployed`.

    An image that fools only the shown model is not an adversarial example.
    """

    def __init__(self, shown: nn.Module, deployed: nn.Module) -> None:
        super().__init__()
        self.shown = shown
        self.deployed = deployed

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.shown(x)
        return logits


def deployed(model: nn.Module) -> nn.Module:
    """The model that decides who is fooled: `model` itself, or the one behind a surrogate."""
    return model.deployed if isinstance(model, Surrogate) else model


def seen_through(model: nn.Module, view: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """`view(model)`; for a surrogate a surrogate of both views, so that the deployed model still gives the verdicts."""
    return Surrogate(view(model.shown), view(model.deployed)) if isinstance(model, Surrogate) else view(model)


def clearly_fooled(logits: Tensor, y: Tensor) -> Tensor:
    """Misclassified by more than float rounding; a mixed label counts as its most likely class."""
    rounding = max(_ROUNDING, torch.finfo(logits.dtype).eps)
    return margin(logits, y) > rounding * logits.abs().amax(1)


def fooled(model: nn.Module, z: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    """Whether `z`, for which `model` returned `logits`, is adversarial; for a surrogate the deployed model decides."""
    return deployed_fooled(model, z, y) if isinstance(model, Surrogate) else clearly_fooled(logits.detach(), y)


def deployed_fooled(model: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    """Whether `z` is adversarial for the deployed model, in a pass of its own."""
    with torch.no_grad():
        return clearly_fooled(deployed(model)(z), y)


def gradient(values: Tensor, z: Tensor, again: bool = False) -> Tensor:
    """The gradient of the summed values at `z`; zero where there is none (a constant model) or it is not finite.

    The sum, not the mean, so that a sample's gradient does not depend on the batch size. With `again` the graph is kept
    for further gradients.
    """
    if not values.requires_grad:
        return torch.zeros_like(z)
    (grad,) = torch.autograd.grad(values.sum(), z, retain_graph=again, allow_unused=True)
    return torch.zeros_like(z) if grad is None else torch.nan_to_num(grad, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class LogitAim:
    """A loss of the logits bound to a batch; `more` holds further arguments of the loss, one entry per sample each."""

    model: nn.Module
    y: Tensor
    loss: Callable[..., Tensor]
    more: tuple[Tensor, ...] = ()

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        return self.loss(logits, self.y, *self.more), fooled(self.model, z, logits, self.y)


@dataclass(frozen=True)
class OnLogits:
    """Maximize a loss of the logits and the label."""

    loss: Loss = cross_entropy

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return LogitAim(model, y, self.loss)


@dataclass(frozen=True)
class FromClean:
    """Maximize KL(p(x) || p(z)), as in TRADES (Zhang et al. 2019, arXiv:1901.08573).

    At z = x the divergence is at its minimum and has no gradient: start elsewhere.
    """

    forwards: ClassVar[int] = 1

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        with torch.no_grad():
            clean = model(x)
        return LogitAim(model, y, lambda logits, _y, clean: kl_divergence(clean, logits), (clean,))


@dataclass
class _GamaAim:
    model: nn.Module
    y: Tensor
    guide: Tensor | None  # None: the probabilities of the first evaluation
    weight: float
    until: float

    keep = keep_samples

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        probabilities = precise(logits).softmax(1)
        if self.guide is None:
            self.guide = probabilities.detach()
        weight = self.weight * max(0.0, 1 - progress / self.until)
        distance = (probabilities - self.guide).square().sum(1)
        return margin(probabilities, self.y) + weight * distance, fooled(self.model, z, logits, self.y)


@dataclass(frozen=True)
class Gama:
    """Guided adversarial margin attack (GAMA, Sriramanan et al. 2020, arXiv:2011.14969).

    The margin of the probabilities plus the squared distance to the guide's probabilities, whose weight falls linearly
    to zero at the share `until` of the steps. The guide is the `clean` image, as in the paper, or the random start
    (`init`), as in the released code, where the distance has no gradient in the first step.
    """

    weight: float = 50.0
    until: float = 0.25
    guide: str = "clean"

    def __post_init__(self) -> None:
        check_known("guide", self.guide, ("clean", "init"), " of GAMA")
        if not 0 < self.until <= 1:
            raise UserError(
                f"until is the share of GAMA's steps with a distance term, above 0 and at most 1, got {self.until:g}; "
                "the paper has 0.25"
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
