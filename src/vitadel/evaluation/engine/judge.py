"""Judges proposed images on the untouched model: box, budget and label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.types import Threat

__all__ = ["TOLERANCE", "Verdict", "judge"]

TOLERANCE = 1e-6
"""Allowance for float rounding in box and budget, in pixel units."""


@dataclass(frozen=True)
class Verdict:
    """`held`: the model still predicts the label. `void`: the proposal breaks the rules and does not count."""

    held: Tensor
    void: Tensor
    prediction: Tensor


@torch.no_grad()
def judge(model: nn.Module, threat: Threat, x: Tensor, z: Tensor, y: Tensor) -> Verdict:
    """An attack succeeds on a sample only if its proposal is finite, in the box, within budget and misclassified."""
    if z.shape != x.shape:
        raise ValueError(f"an attack must return the shape it was given: {tuple(x.shape)}, got {tuple(z.shape)}")
    flat = z.flatten(1)
    finite = flat.isfinite().all(1)
    in_box = ((flat >= -TOLERANCE) & (flat <= 1 + TOLERANCE)).all(1)
    in_budget = threat.size(z, x) <= threat.eps + TOLERANCE
    void = ~(finite & in_box & in_budget)
    logits = model(z.nan_to_num(0.0).clamp(0, 1))
    prediction = logits.argmax(1)
    answered = logits.isfinite().all(1)  # a model that outputs NaN is not robust
    return Verdict(held=(prediction == y) & answered | void, void=void, prediction=prediction)
