"""Adversarial training (Madry et al. 2018, arXiv:1706.06083); with fgsm-rs, fast-AT (Wong et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.training.objectives.terms import accuracy, check_share, cross_entropy, forward_both
from vitadel.types import Attack

__all__ = ["Adversarial"]


@dataclass(frozen=True)
class Adversarial:
    """Cross-entropy of the perturbed images, mixed with a share `clean_share` of that of the clean ones.

    Without such a share no clean pass is made, not even for logs: it would move the statistics of batch norm.
    """

    attack: Attack
    label_smoothing: float = 0.0
    clean_share: float = 0.0

    def __post_init__(self) -> None:
        check_share("label_smoothing", self.label_smoothing)
        check_share("clean_share", self.clean_share)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.clean_share == 0:
            perturbed = model(z)
            robust = cross_entropy(perturbed, y, self.label_smoothing).mean()
            return {"loss": robust, "robust": robust.detach(), "accuracy": accuracy(perturbed, y)}
        clean, perturbed = forward_both(model, x, z)
        natural = cross_entropy(clean, y, self.label_smoothing).mean()
        robust = cross_entropy(perturbed, y, self.label_smoothing).mean()
        return {
            "loss": (1 - self.clean_share) * robust + self.clean_share * natural,
            "natural": natural.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(perturbed, y),
            "clean_accuracy": accuracy(clean, y),
        }
