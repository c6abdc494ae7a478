"""Per-sample losses on logits, with one sign: larger is worse for the model.

Labels are class numbers, or one probability per class for mixed images; a loss that needs one class takes the most
likely one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vitadel.errors import UserError

__all__ = [
    "check_classes",
    "cross_entropy",
    "dlr",
    "floored_margin",
    "hard_labels",
    "kl_divergence",
    "lead",
    "likeliest_wrong",
    "margin",
    "precise",
    "probability_margin",
    "rescaled_cross_entropy",
    "targeted_dlr",
]

_TINY = 1e-12
_LARGE_GAP = 12.0  # of the two largest logits; beyond it the gradients of probabilities round to zero


def check_classes(logits: Tensor) -> None:
    if logits.shape[1] < 2:
        raise UserError(f"an attack needs a model with at least 2 classes, this one has {logits.shape[1]}")


def hard_labels(y: Tensor) -> Tensor:
    """The class of each label; of probabilities the most likely one, the first of equal ones."""
    return y.argmax(1) if y.is_floating_point() else y


def precise(logits: Tensor) -> Tensor:
    """Logits in float32 or better.

    In half precision differences of probabilities near 1 are lost, ties divide by zero, and different iterates get
    equal values.
    """
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of the label; `y` may hold one probability per class."""
    check_classes(logits)
    return F.cross_entropy(precise(logits), y, reduction="none")


def kl_divergence(clean_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(p(clean) || p) in float32 or better, from log-probabilities, so that none rounds to zero."""
    clean, ours = precise(clean_logits).log_softmax(1), precise(logits).log_softmax(1)
    return F.kl_div(ours, clean, reduction="none", log_target=True).sum(1)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Best wrong logit minus the label's: positive exactly if misclassified (Carlini & Wagner 2017)."""
    check_classes(logits)
    logits, label = precise(logits), hard_labels(y)[:, None]
    return logits.scatter(1, label, -torch.inf).amax(1) - logits.gather(1, label).squeeze(1)


def floored_margin(logits: Tensor, y: Tensor, kappa: float = 10.0) -> Tensor:
    """The margin clamped to at least -`kappa`; below, a sample has no gradient.

    Some released attacks have this floor (10 in Mo et al. 2022) and cannot attack confident predictions.
    """
    return margin(logits, y).clamp(min=-kappa)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio (Croce & Hein 2020, arXiv:2003.01690): invariant to shift and scale of the logits.

    The denominator needs a third class; with two classes it is the margin.
    """
    if logits.shape[1] < 3:
        return margin(logits, y)
    logits = precise(logits)
    ranked = logits.sort(dim=1, descending=True).values
    return margin(logits, y) / (ranked[:, 0] - ranked[:, 2] + _TINY)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Targeted difference of logits ratio (Croce & Hein 2020).

    The denominator needs a fourth class; with three classes it is that of `dlr`, with two there is none.
    """
    logits, classes = precise(logits), logits.shape[1]
    if classes < 3:
        return lead(logits, y, target)
    ranked = logits.sort(dim=1, descending=True).values
    low = ranked[:, 2] if classes == 3 else (ranked[:, 2] + ranked[:, 3]) / 2
    return lead(logits, y, target) / (ranked[:, 0] - low + _TINY)


def likeliest_wrong(logits: Tensor, y: Tensor) -> Tensor:
    """All classes but the label, the most likely first, (samples, classes - 1)."""
    wrong = logits.scatter(1, hard_labels(y)[:, None], -torch.inf)
    return wrong.argsort(dim=1, descending=True, stable=True)[:, :-1]


def lead(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the label's."""
    logits = precise(logits)
    return (logits.gather(1, target[:, None]) - logits.gather(1, hard_labels(y)[:, None])).squeeze(1)


def rescaled_cross_entropy(logits: Tensor, y: Tensor, gap: float = 10.0) -> Tensor:
    """Cross-entropy after scaling each sample's logits so that the two largest differ by `gap` (MIFPE, Yu & Xu 2023).

    The cross-entropy of large logits and its gradient round to zero. The scale itself is not differentiated.
    """
    check_classes(logits)
    logits = precise(logits)
    best = logits.detach().topk(2, dim=1).values
    scale = gap / (best[:, 0] - best[:, 1]).clamp(min=1e-6)
    return cross_entropy(logits * scale[:, None], y)


def probability_margin(logits: Tensor, y: Tensor, part: str = "margin") -> Tensor:
    """Best wrong probability minus the label's (Xie et al. 2025, arXiv:2411.15210), or one of the two (`part`).

    Where the two largest logits are far apart, probabilities would round to 0 and 1, so the logits are scaled first.
    """
    logits, y = precise(logits), hard_labels(y)
    best = logits.detach().topk(2, dim=1).values
    gap = best[:, 0] - best[:, 1]
    scale = torch.where(gap > _LARGE_GAP, gap, torch.ones_like(gap))
    probabilities = (logits / scale[:, None]).softmax(1)
    if part == "label":
        return -probabilities.gather(1, y[:, None]).squeeze(1)
    if part == "rival":
        return probabilities.scatter(1, y[:, None], -torch.inf).amax(1)
    return margin(probabilities, y)
