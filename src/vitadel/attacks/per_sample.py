"""Values with one entry per sample: shape them for a batch, and select samples from dataclasses that hold them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, cast

from torch import Tensor

from vitadel.runtime.rng import SampleRNG

__all__ = ["PerSample", "per_sample"]


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample, in a shape that broadcasts with `like`."""
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


class PerSample:
    """Base of dataclasses whose tensors, tuples of tensors and random streams hold one entry per sample."""

    def keep(self, chosen: Tensor) -> Self:
        """A copy for the chosen samples; other fields stay as they are."""
        part = cast(Any, self)
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        return cast(Self, dataclasses.replace(part, **{name: _select(value, chosen) for name, value in fields.items()}))


def _select(value: Any, chosen: Tensor) -> Any:
    if isinstance(value, (Tensor, SampleRNG)):
        return value[chosen]
    if isinstance(value, tuple) and all(isinstance(each, Tensor) for each in value):
        return tuple(each[chosen] for each in value)
    return value
