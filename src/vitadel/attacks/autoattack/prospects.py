"""How likely the rest of `autoattack-fast` still breaks a sample, judged after the runs towards its nearest targets.

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

FEATURES = ("distance", "trend", "spread", "second rival")
"""Logarithms of: the distance to the linearized boundary in units of eps; the margin at half of the run on probability
margins, over that at its end; the margin of the worst run over that of the best; the distance in logits to the second
rival over that to the first."""

INTERCEPT, WEIGHTS = -7.00, (-3.02, 0.0, 0.0, -2.96)
"""Fitted by `scripts/fit_prospects.py` to 207 samples of four models, of which later stages broke four: small networks
on patterns of 10 and 20 classes (Linf, L2, L1) and `zoo:shapes-pgd-at`. Trend and spread did not help on models left
out. What remains is about three times the logarithm of the distance to the second rival: the other targets matter where
it is near."""

_LEAST = 1e-6  # smaller ratios are as good as zero, and the inverse as infinity


def features_of(missing: Tensor, logits: Tensor, y: Tensor, searches: Sequence[Progress]) -> Tensor:
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
    return ratios.clamp(min=_LEAST, max=1 / _LEAST).log()


def chance_of(features: Tensor) -> Tensor:
    """The chance that a later stage breaks a sample with these `FEATURES`; NaN where they are not known."""
    return torch.sigmoid(INTERCEPT + features @ torch.tensor(WEIGHTS, dtype=features.dtype, device=features.device))
