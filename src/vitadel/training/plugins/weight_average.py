"""Weight averaging: the exponential moving average of steps, or the mean of epochs (Izmailov et al. 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitadel.errors import check_known
from vitadel.quantities import BELOW_ONE, check_ranges
from vitadel.training.interfaces import Training, warn_late_start

_KINDS = ("ema", "mean")
_COUNT, _PREFIX = "count", "average."


@dataclass
class WeightAverage:
    """Validates and saves averaged weights from epoch `from_epoch` on; training continues with the last ones.

    'ema': after every step, average = d * average + (1 - d) * weights with d = min(decay, (1 + t) / (10 + t)), t the
    number of steps averaged before, so that early weights fade quickly. 'mean': the mean of the weights at the ends of
    epochs. Buffers are always the latest: batch-norm statistics belong to the last weights, and attention factors are
    those that the weights were trained with.
    """

    decay: float = 0.999
    kind: str = "ema"
    from_epoch: int = 0
    _average: dict[str, Tensor] = field(init=False, default_factory=dict, repr=False)
    _count: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        check_known("kind", self.kind, _KINDS, " of weight average")
        check_ranges(self, decay=BELOW_ONE)

    def length_warning(self, epochs: int) -> str | None:
        return warn_late_start(self.from_epoch, epochs)

    def after_step(self, run: Training) -> None:
        if self.kind == "ema" and run.epoch >= self.from_epoch:
            decay = min(self.decay, (1 + self._count) / (10 + self._count))
            self._update(run.model, 1 - decay)

    def after_epoch(self, run: Training) -> None:
        if self.kind == "mean" and run.epoch >= self.from_epoch:
            self._update(run.model, 1 / (1 + self._count))

    @torch.no_grad()
    def _update(self, model: nn.Module, share: float) -> None:
        for name, weight in _weights(model):
            # Never in half precision, where small updates would round to zero.
            current = weight.to(torch.promote_types(weight.dtype, torch.float32))
            if self._count == 0:
                self._average[name] = current.clone()
            else:
                self._average[name] = self._average[name].to(current.device).lerp_(current, share)
        self._count += 1

    @contextmanager
    def evaluated(self, run: Training) -> Iterator[None]:
        if not self._average:
            yield
            return
        trained = {name: weight.detach().clone() for name, weight in _weights(run.model)}
        _set_weights(run.model, self._average)
        try:
            yield
        finally:
            _set_weights(run.model, trained)

    def state(self) -> dict[str, Tensor]:
        return {_COUNT: torch.tensor(self._count), **{_PREFIX + name: each for name, each in self._average.items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._count = int(state[_COUNT])
        self._average = {name.removeprefix(_PREFIX): each.clone() for name, each in state.items() if name != _COUNT}


def _weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, weight) for name, weight in model.named_parameters() if weight.is_floating_point()]


@torch.no_grad()
def _set_weights(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, weight in _weights(model):
        weight.copy_(values[name])
