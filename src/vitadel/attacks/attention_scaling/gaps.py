"""How saturated each softmax attention is, and which factor brings its scores to where the softmax has a slope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.instrument.attention import score_statistics

ROUNDS_TO_ONE = {torch.float64: 36.7, torch.float32: 16.6, torch.float16: 7.6, torch.bfloat16: 5.5}
"""The gap from which the softmax of a row is one-hot to the last bit."""

SATURATED = 0.25
"""The share of such rows from which an attention is saturated; in honest models there are none."""

SOFT = 2.0
"""The gap of the two largest scores that attention is scaled to: the softmax is neither one-hot nor uniform there."""


def precision_of(model: nn.Module) -> torch.dtype:
    return next((part.dtype for part in model.parameters() if part.is_floating_point()), torch.float32)


@torch.no_grad()
def score_gaps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """For every attention, over images, heads and queries: the largest score minus the second largest.

    Rows with a single key, which have no second score, are left out.
    """
    with score_statistics(model) as gaps:
        model(x)
        flat = [gap.flatten().float() for gap in gaps]
    return [gap[gap.isfinite()] for gap in flat]


def quantile(gap: Tensor, share: float) -> float:
    """By rank: torch's own quantile refuses more than 16 million values."""
    return float(gap.kthvalue(max(1, int(share * len(gap)))).values) if len(gap) else 0.0


def softening(gaps: Sequence[Tensor], share: float = 0.9) -> tuple[float, ...]:
    """One factor per attention, at most 1, with which this share of its rows has a gap of at most `SOFT`."""
    return tuple(min(1.0, SOFT / max(quantile(gap, share), 1e-12)) for gap in gaps)


@dataclass(frozen=True)
class Saturation:
    """The share of rows, for every attention, whose gap is beyond what the model's precision resolves."""

    beyond: float
    rows: tuple[float, ...]
    largest_gap: float

    @classmethod
    def of(cls, model: nn.Module, gaps: Sequence[Tensor]) -> Saturation:
        beyond = ROUNDS_TO_ONE[precision_of(model)]
        rows = tuple(float((gap > beyond).double().mean()) if len(gap) else 0.0 for gap in gaps)
        return cls(beyond, rows, max((float(gap.max()) for gap in gaps if len(gap)), default=0.0))

    @property
    def is_saturated(self) -> bool:
        return max(self.rows, default=0.0) > SATURATED
