"""Measures of stability under changed patches: attention maps, features and predictions (AFAT, CVPR 2023)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitadel.errors import UserError
from vitadel.statistics import bootstrap_mean, share, wilson

SIMILARITIES = ("map", "rows", "centre")
_BINS = 40

Numbers = NDArray[np.floating[Any]]


def map_similarity(clean: Tensor, other: Tensor, batch: int, kind: str, prefix: int) -> Tensor:
    """The cosine of two attention maps of one layer, a mean over heads; one number per image.

    'map' compares the whole map of a head as one vector, 'rows' takes the mean cosine of its rows, and 'centre' the row
    of the central patch. Windows count as further heads.
    """
    ours, theirs = (each.float().unflatten(0, (batch, -1)) for each in (clean, other))
    if kind == "map":
        ours, theirs = ours.flatten(-2), theirs.flatten(-2)
    elif kind == "centre":
        place = _center(ours.shape[-2], prefix)
        ours, theirs = ours[..., place, :], theirs[..., place, :]
    return F.cosine_similarity(ours, theirs, dim=-1).flatten(1).mean(1)


def _center(tokens: int, prefix: int) -> int:
    side = math.isqrt(tokens - prefix)
    if side * side != tokens - prefix:
        raise UserError(
            f"{tokens - prefix} patches form no square, so none is central; compare whole maps (map) or rows"
        )
    return prefix + side // 2 * side + side // 2


def drift(clean: Tensor, other: Tensor) -> Tensor:
    """The change of features as a share of their length: |F(x') - F(x)| / |F(x)|, one number per image."""
    gap: Tensor = torch.linalg.vector_norm((other.float() - clean.float()).flatten(1), dim=1)
    size: Tensor = torch.linalg.vector_norm(clean.float().flatten(1), dim=1)
    return gap / size.clamp(min=1e-30)


def over_masks(right: NDArray[np.bool_]) -> dict[str, Any]:
    """Accuracy over masks, from (images, masks): each image's own outcomes in order, worst mask first.

    `curve[k]` is the share of images that are right under their (k+1)-th worst mask, so that the first is the accuracy
    if the worst of all masks is chosen for each image, the last if the best is. `by_mask` is another reading: one mask
    drawn for each image makes an accuracy, and these are the lowest and highest of them. They hardly differ where
    there are many images, whatever the model. The mean's interval is that of as many images with one mask each: more
    masks make it narrower by an amount that depends on the model, which is given away.
    """
    images, masks = right.shape
    count = right.sum(1)
    curve = [float((count >= masks - place).mean()) for place in range(masks)]
    each = right.mean(0)
    return {
        "mean": float(right.mean()),
        "ci95": list(wilson(round(images * float(right.mean())), images)),
        "n": images,
        "worst": share(int((count == masks).sum()), images, "held", "accuracy"),
        "best": share(int((count > 0).sum()), images, "held", "accuracy"),
        "quartiles": [curve[min(masks - 1, round(part * (masks - 1)))] for part in (0.25, 0.5, 0.75)],
        "curve": curve,
        "by_mask": {"lowest": float(each.min()), "highest": float(each.max())},
    }


def mean_with_interval(values: Numbers, name: str = "mean", least: float = -1.0, seed: int = 0) -> dict[str, Any]:
    """A mean over images and its 95 % interval; masks of one image are no new images.

    One image says nothing about others, so its interval is from the `least` to the largest value that there can be, 1.
    """
    low, high = bootstrap_mean(values, seed) if len(values) > 1 else (least, 1.0)
    return {name: float(values.mean()), "ci95": [low, high], "n": len(values)}


def quartiles_of(values: Numbers) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile over images, for (images, places)."""
    lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    return {"lower": lower.tolist(), "median": median.tolist(), "upper": upper.tolist()}


def steps_below_one(smallest: float) -> list[float]:
    """Edges of equal steps up to 1, for cosines of which this is the smallest; the same for all that are compared."""
    low = min(math.floor(20 * smallest) / 20, 0.95)
    return [low + (1.0 - low) * step / _BINS for step in range(_BINS + 1)]


def histogram(values: Numbers, edges: Sequence[float]) -> dict[str, list[float]]:
    """How many images lie in each step; rounding beyond the ends counts as at them."""
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return {"edges": list(edges), "counts": counts.tolist()}
