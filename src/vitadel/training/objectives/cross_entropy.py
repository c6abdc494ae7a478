"""Cross-entropy training on clean images, or adversarial training on attacked ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from vitadel.quantities import SHARE, check_ranges
from vitadel.training.objectives.terms import accuracy, cross_entropy, forward_both
from vitadel.types import Attack

__all__ = ["Adversarial", "Standard"]


@dataclass(frozen=True)
class Standard:
    """Cross-entropy of clean images: the baseline of robust training."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, label_smoothing=SHARE)

    @property
    def attack(self) -> Attack | None:
        return None

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        loss = cross_entropy(logits, y, self.label_smoothing).mean()
        return {"loss": loss, "natural": loss.detach(), "clean_accuracy": accuracy(logits, y)}


@dataclass(frozen=True)
class Adversarial:
    """Adversarial training (Madry et al. 2018, arXiv:1706.06083); with fgsm-rs, fast-AT (Wong et al. 2020).

    Cross-entropy of the attacked images, mixed with a share `clean_share` of that of the clean ones. Without such a
    share there is no clean forward pass, not even for logs: it would change the statistics of batch norm.
    """

    attack: Attack
    label_smoothing: float = 0.0
    clean_share: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, label_smoothing=SHARE, clean_share=SHARE)

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.clean_share == 0:
            attacked = model(z)
            robust = cross_entropy(attacked, y, self.label_smoothing).mean()
            return {"loss": robust, "robust": robust.detach(), "accuracy": accuracy(attacked, y)}
        clean, attacked = forward_both(model, x, z)
        natural = cross_entropy(clean, y, self.label_smoothing).mean()
        robust = cross_entropy(attacked, y, self.label_smoothing).mean()
        return {
            "loss": (1 - self.clean_share) * robust + self.clean_share * natural,
            "natural": natural.detach(),
            "robust": robust.detach(),
            "accuracy": accuracy(attacked, y),
            "clean_accuracy": accuracy(clean, y),
        }
