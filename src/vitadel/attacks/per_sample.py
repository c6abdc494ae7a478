"""Values with one entry per sample: state that an attack keeps, and what it reports about single samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor, nn

from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

_State = TypeVar("_State")


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """One value per sample, in a shape that broadcasts with `like`."""
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))


def keep_samples(state: _State, chosen: Tensor) -> _State:
    """A copy of a dataclass for the chosen samples: its tensors, tuples of tensors and random streams are indexed.

    Goals and steppers assign it to `keep`, if their state has one entry per sample.
    """
    part = cast(Any, state)
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return cast(_State, dataclasses.replace(part, **{name: _select(value, chosen) for name, value in fields.items()}))


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


class RunsWithInfo(Protocol):
    """An attack whose `__call__` is `images_of` and whose `run_with_info` is `images_and_info_of`."""

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """Images and sample info, which may be left out unless `with_info`."""
        ...


Self = TypeVar("Self")
Call = Callable[[Self, nn.Module, Tensor, Tensor, SampleRNG | None], Tensor]


def takes_arrays(call: Call[Self]) -> Callable[..., Tensor]:
    """Let the `__call__` of an attack take arrays and lists, too; calls with random streams are our own, of tensors."""

    @wraps(call)
    def checked(self: Self, model: nn.Module, x: Any, y: Any, rng: SampleRNG | None = None) -> Tensor:
        if rng is None:
            from vitadel.attacks.caller_inputs import as_tensors

            x, y = as_tensors(model, x, y)
        if len(x) == 0:  # which many models cannot take, those of transformers among them
            return torch.empty_like(x, requires_grad=False)
        return call(self, model, x, y, rng)

    return checked


@takes_arrays
def images_of(attack: RunsWithInfo, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
    """Run the attack without info that would cost further passes."""
    return attack.run(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng, with_info=False)[0]


def images_and_info_of(
    attack: RunsWithInfo, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
) -> tuple[Tensor, SampleInfo]:
    """Run the attack with its sample info."""
    return attack.run(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng, with_info=True)


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
