"""Adversarial weight perturbation (Wu, Xia & Wang, NeurIPS 2020, arXiv:2004.05884)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.errors import UserError
from vitadel.training.plugins.lengths import never_begins
from vitadel.training.protocols import Losses, Training

__all__ = ["AWP"]


@dataclass
class AWP:
    """Each step is taken at weights moved uphill, by `gamma` of each tensor's own length, and moved back afterwards.

    From epoch `from_epoch` on. Matrices and kernels move; norms, biases, tokens and positions stay. The paper takes
    0.01 for PGD-AT from the start, and 0.005 for TRADES from epoch 10 on.
    """

    gamma: float = 0.005
    from_epoch: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise UserError(
                f"gamma, how far AWP moves each weight tensor, must be positive and finite, got {self.gamma:g}"
            )
        if self.from_epoch < 0:
            raise UserError(f"from_epoch, the first epoch of AWP, must be at least 0, got {self.from_epoch}")

    def length_warning(self, epochs: int) -> str | None:
        return never_begins(self.from_epoch, epochs)

    @contextmanager
    def around_step(self, run: Training, losses: Losses) -> Iterator[None]:
        if run.epoch < self.from_epoch:
            yield
            return
        weights = _movable(run.model)
        moves = [self.gamma * way for way in _uphill(run, weights, losses)]
        with torch.no_grad():
            torch._foreach_add_(weights, moves)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_sub_(weights, moves)


def _movable(model: nn.Module) -> list[Tensor]:
    return [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.dim() >= 2 and "weight" in name
    ]


def _uphill(run: Training, weights: list[Tensor], losses: Losses) -> list[Tensor]:
    """For each weight tensor, the direction in which the mean loss grows, as long as the tensor itself."""
    slopes = [torch.zeros_like(weight) for weight in weights]
    with _statistics_held(run.model):
        for loss in losses():
            # Not backward(): gradients that the optimizer will use are none of our business.
            for total, slope in zip(slopes, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                if slope is not None:
                    total += slope
    # Parts count alike, and lengths are taken below, so the sum of the parts does for their mean. Every process takes
    # part for every tensor, used or not: all must move alike.
    return [_as_long_as(weight, run.processes.mean(slope)) for weight, slope in zip(weights, slopes, strict=True)]


def _as_long_as(weight: Tensor, slope: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(slope)
    way = torch.linalg.vector_norm(weight.detach()) / (length + 1e-20) * slope
    # Half precision may overflow; the optimizer's step is then skipped, but a weight once NaN would stay so.
    return torch.where(length.isfinite(), way, torch.zeros_like(way))


@contextmanager
def _statistics_held(model: nn.Module) -> Iterator[None]:
    """Batch norms use the batch's statistics and do not learn from it: this pass is not the one that counts."""
    norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    for norm in norms:
        norm.track_running_stats = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True  # type: ignore[assignment]
