"""MALT's order of target classes (Melamed, Yehudai & Shamir 2024, arXiv:2407.02240).

A network is nearly linear in a ball the size of a perturbation, so the easiest target is the class with the nearest
linearized boundary: the gap of the logits divided by the dual norm of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.attacks.losses import likeliest_wrong
from vitadel.attacks.threats import dual_order
from vitadel.types import Threat


def linear_distances(model: nn.Module, x: Tensor, y: Tensor, classes: Tensor, order: float) -> Tensor:
    """The distance to the linearized boundary with each of `classes` (samples, number); infinite for a zero gradient.

    One forward pass, and one backward pass per class; only the norms of the gradients are kept.
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
    """The `wanted` nearest wrong classes of each sample, nearest first, among the `candidates` most likely ones.

    `logits` are the clean ones. If all candidates are wanted, they keep their order by logit, which costs no pass.
    """
    ranked = likeliest_wrong(logits, y)[:, :candidates]
    if ranked.shape[1] <= wanted:
        return ranked
    distances = linear_distances(model, x, y, ranked, dual_order(threat))
    return ranked.gather(1, distances.argsort(dim=1, stable=True)[:, :wanted])
