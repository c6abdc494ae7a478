"""Terms that objectives share: per-sample losses in at least float32, and the forward passes they need."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.attacks.losses import hard_labels, precise

__all__ = ["accuracy", "cross_entropy", "forward_both", "has_batch_norm"]


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
