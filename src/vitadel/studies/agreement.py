"""Do other models see a class in a picture? Top-1 and top-k agreement, and what it would be by chance alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.statistics import share

__all__ = ["TOP", "agreement", "chance", "dealt_at_random", "top_classes", "top_of"]

TOP = 5
"""How many answers of a model count, where it has more classes than that."""

_Z95 = 1.959963984540054
Classes = NDArray[np.integer[Any]]


def top_of(classes: int) -> int:
    """The k of top-k: five, or all answers but one of a model with few classes, since all of them are always right."""
    return max(1, min(TOP, classes - 1))


def top_classes(logits: Tensor, k: int) -> Tensor:
    """(images, k), the likeliest first; stable, so that of equal logits the first is what argmax gives."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k].to(torch.int32)


def agreement(tops: Classes, targets: Classes) -> dict[str, Any]:
    """The share of pictures whose target is the first answer, and that of those where it is among all answers given."""
    found = tops == targets[:, None]
    return {
        "top1": share(int(found[:, :1].any(1).sum()), len(targets), "right", "accuracy"),
        "topk": share(int(found.any(1).sum()), len(targets), "right", "accuracy"),
    }


def dealt_at_random(tops: Classes, targets: Classes, classes: int) -> dict[str, Any]:
    """The same agreement if the pictures were dealt out to the targets at random: mean and middle 95 % of all deals.

    Exact moments over all permutations (Hoeffding 1951), without drawing any. It knows what 1/classes does not: that a
    model may answer one class to every such picture, and that targets may not be balanced.
    """
    return {"top1": _dealt(tops[:, :1], targets, classes), "topk": _dealt(tops, targets, classes)}


def _dealt(tops: Classes, targets: Classes, classes: int) -> dict[str, Any]:
    n = len(targets)
    if n == 0:
        return {"accuracy": 0.0, "ci95": [0.0, 1.0], "n": 0}
    wanted = np.bincount(targets, minlength=classes).astype(np.float64)
    answered = np.bincount(tops.reshape(-1), minlength=classes).astype(np.float64)
    # a[i, j]: is target j among the answers to picture i? Its means over rows, over columns and over all:
    of_picture = wanted[tops].sum(1) / n
    of_target = answered[targets] / n
    mean = float(wanted @ answered) / n / n  # of whole numbers, so that rounding cannot lift it beside a share of n
    squares = n * n * mean + n * n * mean**2 - n * float((of_picture**2).sum() + (of_target**2).sum())
    # Zero where all deals agree, which rounding may miss on either side.
    spread = math.sqrt(max(squares, 0.0) / (n - 1)) / n if n > 1 else 0.0
    return {"accuracy": mean, "ci95": [max(0.0, mean - _Z95 * spread), min(1.0, mean + _Z95 * spread)], "n": n}


def chance(classes: int) -> dict[str, float]:
    """What blind guessing scores where every class is as frequent as the others."""
    return {"top1": 1 / classes, "topk": top_of(classes) / classes}
