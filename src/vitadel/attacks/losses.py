"""Per-sample losses on logits, with one sign: larger is worse for the model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["cross_entropy", "margin"]


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the label; `y` may also hold one probability per class."""
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Best wrong logit minus the label's: positive exactly when misclassified (Carlini & Wagner 2017)."""
    true = logits.gather(1, y[:, None]).squeeze(1)
    return logits.scatter(1, y[:, None], -torch.inf).amax(1) - true
