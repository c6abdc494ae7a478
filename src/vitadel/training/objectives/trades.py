"""TRADES (Zhang et al. 2019, arXiv:1901.08573): a trade-off between clean accuracy and local consistency."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.attacks.losses import kl_divergence
from vitadel.quantities import NOT_NEGATIVE, SHARE, check_ranges
from vitadel.training.objectives.cross_entropy import accuracy, cross_entropy, forward_both
from vitadel.types import Attack


@dataclass(frozen=True)
class Trades:
    """CE(p(x), y) + beta * KL(p(x) || p(z)), with gradients through both p(x) and p(z).

    The released attack is `kl-10` with steps of 0.007 at eps 0.031, beta 6. `together`: one forward pass over clean and
    attacked images; None means yes, unless the model has batch norm (`cross_entropy.forward_both`).
    """

    attack: Attack
    beta: float = 6.0
    label_smoothing: float = 0.0
    together: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(self, beta=NOT_NEGATIVE, label_smoothing=SHARE)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        clean, attacked = forward_both(model, x, z, self.together)
        natural = cross_entropy(clean, y, self.label_smoothing).mean()
        robust = kl_divergence(clean, attacked).mean()
        return {
            "loss": natural + self.beta * robust,
            "natural": natural.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(attacked, y),
            "clean_accuracy": accuracy(clean, y),
        }
