"""MART: misclassification-aware adversarial training (Wang et al., ICLR 2020), as in the released code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import hard_labels, precise
from vitadel.quantities import NOT_NEGATIVE, check_ranges
from vitadel.training.objectives.cross_entropy import accuracy, cross_entropy, forward_both
from vitadel.types import Attack

# Constants of the released code: they keep logarithms finite and every sample's weight above 0.
_TINY = 1e-12
_ABOVE_ONE = 1.0001
_WEIGHT_ABOVE_ONE = 1.0000001


@dataclass(frozen=True)
class Mart:
    """Boosted cross-entropy of z plus beta * KL(p(x) || p(z)), weighted by 1 - p_y(x) per sample.

    The boost is -log(1 - largest wrong probability). Gradients flow through the weight, which is largest for
    misclassified clean images. With mixed labels, y in p_y and in the wrong classes is the likeliest class. The
    released attack is PGD on the cross-entropy, 10 steps of 0.007 at eps 0.031. `together`: one forward pass over clean
    and attacked images; None means yes, unless the model has batch norm (`cross_entropy.forward_both`).
    """

    attack: Attack
    beta: float = 5.0
    together: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(self, beta=NOT_NEGATIVE)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        clean, attacked = forward_both(model, x, z, self.together)
        label = hard_labels(y)[:, None]
        boosted = (cross_entropy(attacked, y) + _margin_term(attacked, label)).mean()
        weight = _WEIGHT_ABOVE_ONE - precise(clean).softmax(1).gather(1, label).squeeze(1)
        robust = (_clamped_divergence(clean, attacked) * weight).mean()
        return {
            "loss": boosted + self.beta * robust,
            "boosted": boosted.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(attacked, y),
            "clean_accuracy": accuracy(clean, y),
        }


def _margin_term(logits: Tensor, label: Tensor) -> Tensor:
    wrong = precise(logits).softmax(1).scatter(1, label, -torch.inf).amax(1)
    return -torch.log(_ABOVE_ONE - wrong + _TINY)


def _clamped_divergence(clean_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(p(x) || p(z) + 1e-12), from clean log-probabilities: the logarithm of a zero would have no gradient."""
    clean = precise(clean_logits).log_softmax(1)
    return (clean.exp() * (clean - torch.log(precise(logits).softmax(1) + _TINY))).sum(1)
