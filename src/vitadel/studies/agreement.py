"""Agreement of a model's top-1 and top-k predictions with given classes, and what it would be by chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.statistics import share

TOP = 5
"""The k of top-k, for models with more classes than that."""

_Z95 = 1.959963984540054
Classes = NDArray[np.integer[Any]]


def top_of(classes: int) -> int:
    """The k of top-k: five, or all classes but one, because all of them are always right."""
    return max(1, min(TOP, classes - 1))


def top_classes(logits: Tensor, k: int) -> Tensor:
    """(images, k), the likeliest first; stable, so that of equal logits the first is what argmax gives."""
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :k].to(torch.int32)


def agreement(tops: Classes, targets: Classes) -> dict[str, Any]:
    """The share of images whose target is the first prediction, and of those where it is among all of them."""
    found = tops == targets[:, None]
    return {
        "top1": share(int(found[:, :1].any(1).sum()), len(targets), "right", "accuracy"),
        "topk": share(int(found.any(1).sum()), len(targets), "right", "accuracy"),
    }


def permuted_agreement(tops: Classes, targets: Classes, classes: int) -> dict[str, Any]:
    """The agreement if targets were permuted at random over the images: mean and central 95 % of all permutations.

    Exact moments (Hoeffding 1951), without sampling. Unlike 1/classes it accounts for a model that predicts one class
    for every such image, and for unbalanced targets.
    """
    return {"top1": _permuted(tops[:, :1], targets, classes), "topk": _permuted(tops, targets, classes)}


def _permuted(tops: Classes, targets: Classes, classes: int) -> dict[str, Any]:
    n = len(targets)
    if n == 0:
        return {"accuracy": 0.0, "ci95": [0.0, 1.0], "n": 0}
    wanted = np.bincount(targets, minlength=classes).astype(np.float64)
    predicted = np.bincount(tops.reshape(-1), minlength=classes).astype(np.float64)
    # a[i, j]: is target j among the predictions for image i? Its means over rows, over columns and over all:
    of_image = wanted[tops].sum(1) / n
    of_target = predicted[targets] / n
    mean = float(wanted @ predicted) / n / n  # of integers, so that rounding cannot lift it above a share of n
    squares = n * n * mean + n * n * mean**2 - n * float((of_image**2).sum() + (of_target**2).sum())
    # Zero if all permutations agree, which rounding may miss on either side.
    spread = math.sqrt(max(squares, 0.0) / (n - 1)) / n if n > 1 else 0.0
    return {"accuracy": mean, "ci95": [max(0.0, mean - _Z95 * spread), min(1.0, mean + _Z95 * spread)], "n": n}


def chance(classes: int) -> dict[str, float]:
    """The score of random guessing if all classes are equally frequent."""
    return {"top1": 1 / classes, "topk": top_of(classes) / classes}
