"""TRADES: accuracy on clean images, and the same answer around them (Zhang et al. 2019, arXiv:1901.08573)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.training.objectives.terms import (
    accuracy,
    check_share,
    check_weight,
    cross_entropy,
    forward_both,
    kl_divergence,
)
from vitadel.types import Attack

__all__ = ["Trades"]


@dataclass(frozen=True)
class Trades:
    """CE(p(x), y) + beta * KL(p(x) || p(z)), with a gradient through both p(x) and p(z); labels only enter the first.

    The released attack is `kl-10` with steps of 0.007 at eps 0.031, beta 6. `together`: both passes in one; None leaves
    the choice to whether there is batch norm (`terms.forward_both`).
    """

    attack: Attack
    beta: float = 6.0
    label_smoothing: float = 0.0
    together: bool | None = None

    def __post_init__(self) -> None:
        check_weight("beta", self.beta)
        check_share("label_smoothing", self.label_smoothing)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        clean, perturbed = forward_both(model, x, z, self.together)
        natural = cross_entropy(clean, y, self.label_smoothing).mean()
        robust = kl_divergence(clean, perturbed).mean()
        return {
            "loss": natural + self.beta * robust,
            "natural": natural.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(perturbed, y),
            "clean_accuracy": accuracy(clean, y),
        }
