"""What attacks tell about single samples, put together where they ran on parts of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, explained

__all__ = ["Notes", "join_notes", "proposals"]

Notes = dict[str, Tensor]
"""One value per sample under each name."""


def proposals(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None, noted: bool
) -> tuple[Tensor, Notes]:
    """An attack's images, and its notes if they are wanted: some cost passes."""
    return explained(attack, model, x, y, rng) if noted else (attack(model, x, y, rng), {})


def join_notes(notes: Notes, told: Mapping[str, Tensor], place: Tensor, count: int) -> None:
    """Write what was told about the samples at `place` of a batch of `count` into its notes: the last word counts.

    About samples that nobody has told of, numbers are NaN, whole ones -1, and answers no.
    """
    for name, values in told.items():
        if name not in notes:
            notes[name] = values.new_full((count,), _nothing(values.dtype))
        notes[name][place] = values


def _nothing(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return math.nan
    return 0 if dtype == torch.bool else -1
