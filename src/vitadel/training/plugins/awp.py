"""Adversarial weight perturbation (Wu, Xia & Wang, NeurIPS 2020, arXiv:2004.05884)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.quantities import NOT_NEGATIVE, POSITIVE, check_ranges
from vitadel.training.interfaces import Losses, Training, warn_late_start


@dataclass
class AWP:
    """Computes each step's gradients at weights perturbed along the loss gradient, by `gamma` of each tensor's norm.

    From epoch `from_epoch` on. Matrices and kernels are perturbed; norms, biases, tokens and positions are not. The
    paper uses 0.01 for PGD-AT from the start, and 0.005 for TRADES from epoch 10 on.
    """

    gamma: float = 0.005
    from_epoch: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, gamma=POSITIVE, from_epoch=NOT_NEGATIVE)

    def length_warning(self, epochs: int) -> str | None:
        return warn_late_start(self.from_epoch, epochs)

    @contextmanager
    def around_step(self, run: Training, losses: Losses) -> Iterator[None]:
        if run.epoch < self.from_epoch:
            yield
            return
        weights = _perturbed_weights(run.model)
        perturbations = [self.gamma * each for each in _ascent_directions(run, weights, losses)]
        with torch.no_grad():
            torch._foreach_add_(weights, perturbations)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_sub_(weights, perturbations)


def _perturbed_weights(model: nn.Module) -> list[Tensor]:
    return [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.dim() >= 2 and "weight" in name
    ]


def _ascent_directions(run: Training, weights: list[Tensor], losses: Losses) -> list[Tensor]:
    """The gradient of the mean loss for each weight tensor, scaled to the norm of the tensor."""
    gradients = [torch.zeros_like(weight) for weight in weights]
    with _running_statistics_frozen(run.model):
        for loss in losses():
            # Not backward(), which would add to the gradients of the optimizer.
            for total, gradient in zip(gradients, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                if gradient is not None:
                    total += gradient
    # Gradients are rescaled, so the sum over micro-batches serves as their mean. Every process takes part for every
    # tensor, used or not: all must be perturbed alike.
    return [_with_norm_of(weight, run.processes.mean(each)) for weight, each in zip(weights, gradients, strict=True)]


def _with_norm_of(weight: Tensor, gradient: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(gradient)
    scaled = torch.linalg.vector_norm(weight.detach()) / (norm + 1e-20) * gradient
    # Half precision may overflow; the optimizer step is then skipped, but a weight that is NaN would stay NaN.
    return torch.where(norm.isfinite(), scaled, torch.zeros_like(scaled))


@contextmanager
def _running_statistics_frozen(model: nn.Module) -> Iterator[None]:
    """Batch norms use the statistics of the batch and do not update the running ones in this extra pass."""
    norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    for norm in norms:
        norm.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True  # type: ignore[assignment]
