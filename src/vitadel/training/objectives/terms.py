"""What objectives are made of: per-sample terms in float32 at least, and the forward passes that they need."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.attacks.losses import hard_labels, kl_divergence, precise
from vitadel.errors import UserError

__all__ = [
    "accuracy",
    "check_share",
    "check_weight",
    "cross_entropy",
    "forward_both",
    "has_batch_norm",
    "kl_divergence",
]


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy per sample; a share `smoothing` of every label, hard or soft, is spread evenly over all classes."""
    return F.cross_entropy(precise(logits), y, reduction="none", label_smoothing=smoothing)


def accuracy(logits: Tensor, y: Tensor) -> Tensor:
    """The share of samples given their label; where it is mixed, the likeliest class of it."""
    return (logits.detach().argmax(1) == hard_labels(y)).float().mean()


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def forward_both(model: nn.Module, x: Tensor, z: Tensor, together: bool | None = None) -> tuple[Tensor, Tensor]:
    """The logits of clean and perturbed images, from one pass over both or one pass over each.

    `together` None means one pass, unless the model has batch norm: there a common pass normalises both kinds of images
    with statistics of the mixture.
    """
    if together is None:
        together = not has_batch_norm(model)
    if not together:
        return model(x), model(z)
    clean, perturbed = model(torch.cat([x, z])).chunk(2)
    return clean, perturbed


def check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"{name} is a share and must lie in [0, 1], got {value:g}")


def check_weight(name: str, value: float) -> None:
    if not value >= 0:
        raise UserError(f"{name} is the weight of a term and must not be negative, got {value:g}")
