"""Values with one entry per sample: state that an attack keeps, and what it reports about single samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, Self, cast, runtime_checkable

import torch
from torch import Tensor, nn

from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack


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


SampleInfo = dict[str, Tensor]
"""Under each name a tensor with one row per sample."""


@runtime_checkable
class ReportsSampleInfo(Protocol):
    """An attack that can report more about each sample than the image it proposes."""

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, SampleInfo]:
        """The images that `__call__` returns, and the sample info, which may cost further passes."""
        ...


class InfoAttack:
    """Base of attacks that report sample info: they define `_run`, which may skip the info."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self._run(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng, with_info=False)[0]

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, SampleInfo]:
        return self._run(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng, with_info=True)

    def _run(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool
    ) -> tuple[Tensor, SampleInfo]:
        raise NotImplementedError


def run_attack(
    attack: Attack, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None, with_info: bool = True
) -> tuple[Tensor, SampleInfo]:
    """An attack's images and its sample info; empty unless `with_info`, and for attacks that report none."""
    if with_info and isinstance(attack, ReportsSampleInfo):
        return attack.run_with_info(model, x, y, rng)
    return attack(model, x, y, rng), {}


def merge_info(info: SampleInfo, new: Mapping[str, Tensor], place: Tensor, count: int) -> None:
    """Write `new`, about the samples at `place` of a batch of `count`, into `info`; later values replace earlier ones.

    Samples without a value get NaN, -1 for whole numbers, or False.
    """
    for name, values in new.items():
        if name not in info:
            missing = math.nan if values.dtype.is_floating_point else -int(values.dtype != torch.bool)
            info[name] = values.new_full((count, *values.shape[1:]), missing)
        info[name][place] = values
