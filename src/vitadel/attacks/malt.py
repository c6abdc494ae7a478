"""Which wrong class is nearest? MALT's order of targets (Melamed, Yehudai & Shamir 2024, arXiv:2407.02240).

In a ball the size of a perturbation a network is nearly linear, so the class whose boundary is nearest in the linear
model is the easiest target: the gap of the logits divided by the dual norm of the gap's gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.attacks.losses import likeliest_wrong
from vitadel.attacks.threats import L1, L2
from vitadel.types import Threat

__all__ = ["dual_order", "linear_distances", "nearest_targets"]


def dual_order(threat: Threat) -> float:
    """The order of the norm in which the steepness of a linear function counts for this ball."""
    if isinstance(threat, L1):
        return math.inf
    return 2.0 if isinstance(threat, L2) else 1.0


def linear_distances(model: nn.Module, x: Tensor, y: Tensor, classes: Tensor, order: float) -> Tensor:
    """How far the linearised boundary with each of `classes` (samples, number) is; infinite where nothing slopes.

    One forward pass and one backward pass per class; only norms are kept of the gradients.
    """
    with torch.enable_grad():
        z = x.detach().clone().requires_grad_()
        logits = model(z)
        gaps = logits.gather(1, y[:, None]) - logits.gather(1, classes)
        distances = []
        for column in range(classes.shape[1]):
            slope = gradient(gaps[:, column], z, again=column + 1 < classes.shape[1]).flatten(1)
            steepness = torch.linalg.vector_norm(slope, ord=order, dim=1)
            gap = gaps.detach()[:, column].to(steepness.dtype)
            distances.append(torch.where(steepness > 0, gap / steepness, torch.inf))
    return torch.stack(distances, dim=1)


def nearest_targets(
    model: nn.Module, x: Tensor, y: Tensor, logits: Tensor, threat: Threat, candidates: int, wanted: int
) -> Tensor:
    """The `wanted` nearest wrong classes of each sample, nearest first, of the `candidates` likeliest ones.

    `logits` are the clean ones. Where all candidates are wanted anyway, their order by logit costs nothing and does.
    """
    ranked = likeliest_wrong(logits, y)[:, :candidates]
    if ranked.shape[1] <= wanted:
        return ranked
    distances = linear_distances(model, x, y, ranked, dual_order(threat))
    return ranked.gather(1, distances.argsort(dim=1, stable=True)[:, :wanted])
