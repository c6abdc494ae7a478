"""Cross-entropy as an objective, on clean or attacked images, and terms that other objectives share with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.attacks.losses import hard_labels, precise
from vitadel.quantities import SHARE, check_ranges
from vitadel.types import Attack


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy per sample; a share `smoothing` of every label, hard or soft, is spread evenly over all classes."""
    return F.cross_entropy(precise(logits), y, reduction="none", label_smoothing=smoothing)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of correct predictions; the label of a mixed image is its likeliest class."""
    return (logits.detach().argmax(1) == hard_labels(y)).float().mean()


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def forward_both(model: nn.Module, x: Tensor, z: Tensor, together: bool | None = None) -> tuple[Tensor, Tensor]:
    """Logits of clean and attacked images, from one forward pass over both or one pass over each.

    `together` None means one pass, unless the model has batch norm, which would normalize both kinds of images with
    the statistics of their mixture.
    """
    if together is None:
        together = not has_batch_norm(model)
    if not together:
        return model(x), model(z)
    clean, attacked = model(torch.cat([x, z])).chunk(2)
    return clean, attacked


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
