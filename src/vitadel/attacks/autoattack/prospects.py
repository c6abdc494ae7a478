"""How likely the long runs of `autoattack-fast` still break a sample, judged after the short ones.

Most robust samples are far from every boundary, and nothing breaks them. Their evidence is at hand: how far the
linearized boundary still is at the best point, whether the last steps still came closer, how much the runs disagree,
and how far the second rival is. A logistic model turns it into a chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vitadel.attacks.autoattack.best_points import Progress
from vitadel.attacks.losses import likeliest_wrong
from vitadel.attacks.threats import L1
from vitadel.types import Threat

FEATURES = ("distance", "trend", "spread", "second rival", "L1")
"""Logarithms of: the distance to the linearized boundary in units of eps; the margin at half of the run on probability
margins, over that at its end; the margin of the worst run over that of the best; the distance in logits to the second
rival over that to the first. And 1 for budgets in L1, where runs converge more slowly, else 0."""

INTERCEPT, WEIGHTS = -11.09, (-1.34, 0.0, 0.0, 0.0, 2.18)
"""Fitted by `scripts/fit_prospects.py` to 2,882 samples of 13 models that were still correct; later stages broke ten of
them (docs/results.md). Trend, spread and second rival did not help on models left out."""

_LEAST = 1e-6  # smaller ratios are as good as zero, and the inverse as infinity


def features_of(missing: Tensor, logits: Tensor, y: Tensor, searches: Sequence[Progress], threat: Threat) -> Tensor:
    """The `FEATURES` of samples that are still correct, (samples, features).

    `missing` is the linearized distance and `logits` the output at the best point; `searches` are the one on the
    cross-entropy, that on probability margins, and those towards targets.
    """
    ends = torch.stack([-search.end for search in searches])
    trend = -searches[1].half / ends[1]
    spread = ends.max(0).values / ends.min(0).values
    rivals = likeliest_wrong(logits, y)[:, :2]
    gaps = (logits.gather(1, y[:, None]) - logits.gather(1, rivals)).double()
    ratios = torch.stack([missing, trend, spread, gaps[:, -1] / gaps[:, 0]], dim=1)
    in_l1 = torch.full_like(missing, float(isinstance(threat, L1)))
    return torch.cat([ratios.clamp(min=_LEAST, max=1 / _LEAST).log(), in_l1[:, None]], dim=1)


def chance_of(features: Tensor) -> Tensor:
    """The chance that a later stage breaks a sample with these `FEATURES`; NaN where they are not known."""
    return torch.sigmoid(INTERCEPT + features @ torch.tensor(WEIGHTS, dtype=features.dtype, device=features.device))
