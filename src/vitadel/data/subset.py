"""`--limit`: a seeded, class-balanced choice of samples, the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor

from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

__all__ = ["balanced_subset"]


def balanced_subset(labels: Tensor, limit: int | None, seed: int, indices: Tensor | None = None) -> Tensor:
    """Stable indices of `limit` samples, ascending; class counts differ by at most one, unless a class runs out.

    `labels` holds usable labels only; if samples were skipped, `indices` gives the stable index of each label (default:
    its position), so that the draw of the others does not change. The choice is nested: a larger limit keeps every
    sample of a smaller one.
    """
    index = torch.arange(len(labels)) if indices is None else indices.to(torch.int64)
    if limit is not None and limit < 1:
        raise UserError(f"the limit must be at least 1, got {limit}; leave it out to take all {len(labels)} samples")
    if limit is None or limit >= len(labels):
        return index.sort().values
    assert int(labels.min()) >= 0, "samples without a usable label must be skipped first"
    chance = SampleRNG.of_samples(seed, index).stream("subset").bits()
    order = chance.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by class, in random order within each

    names = (counts := labels.bincount()).nonzero()[:, 0]
    sizes = counts[names]
    start = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - start.repeat_interleave(
        sizes
    )  # the k-th sample of every class is taken in turn k
    priority = SampleRNG.of_samples(seed, names).stream("subset classes").bits().argsort(stable=True).argsort()
    by_priority = priority.repeat_interleave(sizes).argsort(stable=True)
    taken = by_priority[turn[by_priority].argsort(stable=True)][:limit]
    return index[order[taken]].sort().values
