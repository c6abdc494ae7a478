"""MART: misclassification-aware adversarial training (Wang et al., ICLR 2020), as in the released code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.losses import hard_labels, precise
from vitadel.training.objectives.terms import accuracy, check_weight, cross_entropy, forward_both
from vitadel.types import Attack

__all__ = ["Mart"]

# The released code's, which keep logarithms finite and no sample without weight.
_TINY = 1e-12
_ABOVE_ONE = 1.0001
_WEIGHT_ABOVE_ONE = 1.0000001


@dataclass(frozen=True)
class Mart:
    """A cross-entropy of z boosted by -log(1 - best wrong probability), plus beta times a KL(p(x) || p(z)) that weighs
    1 - p_y(x) for each sample, so most where the clean image is misclassified. The gradient flows through that weight.

    Of mixed labels the cross-entropy takes all; for p_y and the best wrong class, y is the likeliest. The released
    attack is PGD on the cross-entropy, 10 steps of 0.007 at eps 0.031. `together`: both passes in one; None leaves the
    choice to whether there is batch norm (`terms.forward_both`).
    """

    attack: Attack
    beta: float = 5.0
    together: bool | None = None

    def __post_init__(self) -> None:
        check_weight("beta", self.beta)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        clean, perturbed = forward_both(model, x, z, self.together)
        label = hard_labels(y)[:, None]
        boosted = (cross_entropy(perturbed, y) + _rival_penalty(perturbed, label)).mean()
        doubt = _WEIGHT_ABOVE_ONE - precise(clean).softmax(1).gather(1, label).squeeze(1)
        robust = (_clamped_divergence(clean, perturbed) * doubt).mean()
        return {
            "loss": boosted + self.beta * robust,
            "boosted": boosted.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(perturbed, y),
            "clean_accuracy": accuracy(clean, y),
        }


def _rival_penalty(logits: Tensor, label: Tensor) -> Tensor:
    rival = precise(logits).softmax(1).scatter(1, label, -torch.inf).amax(1)
    return -torch.log(_ABOVE_ONE - rival + _TINY)


def _clamped_divergence(clean_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(p(x) || p(z) + 1e-12). The clean logarithm is not taken of a probability, whose zeros would have no slope."""
    clean = precise(clean_logits).log_softmax(1)
    return (clean.exp() * (clean - torch.log(precise(logits).softmax(1) + _TINY))).sum(1)
