"""Which images a training step sees: a pure function of (seed, step), whatever the number of processes or a resume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitadel.data.preprocess import Preprocess
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.training.augmentation import Augment
from vitadel.types import Source

__all__ = ["DataStream", "Part", "whole_key"]

_EXTRA = 1 << 40  # where the names of the second source's samples begin
_COPY = 1 << 44  # and those of a sample's further versions
_PASSES = 1 << 15  # versions of the second source's samples, which are told apart


def whole_key(seed: int, name: str, *numbers: int) -> int:
    """One seed for a generator that is not ours, e.g. torch's, for one purpose and moment."""
    return int(SampleRNG.of_samples(seed, [0]).stream(name, *numbers).bits()[0]) % 2**62


@dataclass(frozen=True)
class Part:
    """What one process sees at once. `names` are stable: draws for a sample are keyed by them."""

    names: Tensor
    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> Part:
        return Part(self.names, self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class _Pool:
    """Usable samples of a source, in another order in every pass."""

    rows: Tensor
    orders: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def take(self, first: int, count: int, seed: int, name: str) -> Tensor:
        """Rows number `first`, `first + 1`, ... of endless passes."""
        places = torch.arange(first, first + count)
        passes = places // len(self.rows)
        taken = torch.empty(count, dtype=torch.int64)
        for turn in passes.unique().tolist():
            if turn not in self.orders:
                self.orders.clear()
                self.orders[turn] = SampleRNG.of_samples(seed, self.rows).stream(name, turn).bits().argsort(stable=True)
            here = passes == turn
            taken[here] = self.rows[self.orders[turn][places[here] % len(self.rows)]]
        return taken


@dataclass(frozen=True)
class DataStream:
    """Training images in batches of `batch_size` over all processes, `parts` per process and step.

    An epoch is one pass over the first source, less what does not fill a batch. `extra_share` of each batch comes from
    the second source, if there is one. With `repeats` an epoch holds so many versions of as many fewer images. In the
    first `easier_epochs` the first source's images are read from `easier`, under the same names.
    """

    source: Source
    rows: Tensor
    preprocess: Preprocess
    augment: Augment
    batch_size: int
    seed: int = 0
    repeats: int = 1
    extra: Source | None = None
    extra_rows: Tensor | None = None
    extra_share: float = 0.5
    easier: Source | None = None
    easier_epochs: int = 0
    parts: int = 1
    rank: int = 0
    processes: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        if self.batch_size % (self.parts * self.processes):
            raise UserError(
                f"a batch of {self.batch_size} images cannot be shared equally by {self.processes} processes in "
                f"{self.parts} parts each; choose a multiple of {self.parts * self.processes} for train.batch_size"
            )
        if self.steps_per_epoch < 1:
            raise UserError(
                f"a batch takes {self._own} training images, but there are only {len(self.rows)}; choose a smaller "
                "train.batch_size, a larger data.limit or fewer held_out images"
            )

    @property
    def _extra(self) -> int:
        return 0 if self.extra is None else round(self.batch_size * self.extra_share)

    @property
    def _own(self) -> int:
        return self.batch_size - self._extra

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self._own

    def names(self, step: int) -> Tensor:
        """The batch of a step, all processes together: rows, with the second source's and further versions marked."""
        epoch, turn = divmod(step, self.steps_per_epoch)
        place = torch.arange(turn * self._own, (turn + 1) * self._own)
        pool = self._pools[0]
        first = int(place[0]) // self.repeats
        rows = pool.take(epoch * len(pool.rows) + first, int(place[-1]) // self.repeats - first + 1, self.seed, "order")
        names = rows[place // self.repeats - first] + (place % self.repeats) * _COPY
        if not self._extra:
            return names
        place = torch.arange(step * self._extra, (step + 1) * self._extra)
        passes = place // len(self._pools[1].rows) % _PASSES  # which make versions, too, however often in an epoch
        more = self._pools[1].take(int(place[0]), self._extra, self.seed, "extra order") + _EXTRA + passes * _COPY
        # Mixed, so that every process gets its share of both.
        order = SampleRNG.of_samples(self.seed, [step]).stream("mix").permutation(self.batch_size)[0]
        return torch.cat([names, more])[order]

    @cached_property
    def _pools(self) -> tuple[_Pool, _Pool]:
        return _Pool(self.rows), _Pool(self.rows if self.extra_rows is None else self.extra_rows)

    def steps(self, first: int, last: int) -> Iterator[list[Part]]:
        """This process's parts of the batches of steps `first` to `last - 1`; nothing before is read."""
        dataset = _Tickets(self)
        size = self.batch_size // (self.parts * self.processes)

        def tickets() -> Iterator[list[tuple[int, int]]]:
            for step in range(first, last):
                mine = self.names(step).view(self.processes, self.parts, size)[self.rank]
                epoch = step // self.steps_per_epoch
                for part in mine:
                    yield [(name, epoch) for name in part.tolist()]

        loader: DataLoader[Part | UserError] = DataLoader(
            cast("Dataset[Part | UserError]", dataset),
            batch_sampler=cast("Iterable[list[int]]", tickets()),
            num_workers=self.workers,
            collate_fn=cast("Callable[[list[Any]], Any]", _whole),
            prefetch_factor=2 if self.workers else None,
        )
        parts: list[Part] = []
        for part in loader:
            if isinstance(part, UserError):  # raised here, since a worker process would bury it in its traceback
                raise part
            parts.append(part)
            if len(parts) == self.parts:
                yield parts
                parts = []


def _whole(part: Part | UserError) -> Part | UserError:
    return part


class _Tickets:
    """What torch's loader asks for a batch, in this process or in workers."""

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self.labels = (stream.source.labels(), None if stream.extra is None else stream.extra.labels())

    def __len__(self) -> int:
        return len(self.stream.rows)

    def __getitem__(self, ticket: tuple[int, int]) -> Part | UserError:
        return self.__getitems__([ticket])

    def __getitems__(self, tickets: Sequence[tuple[int, int]]) -> Part | UserError:
        try:
            return self._read(tickets)
        except UserError as mistake:
            return mistake

    def _read(self, tickets: Sequence[tuple[int, int]]) -> Part:
        stream, epoch = self.stream, tickets[0][1]
        own = stream.easier if stream.easier is not None and epoch < stream.easier_epochs else stream.source
        names = torch.tensor([name for name, _ in tickets])
        rows, extra = names % _EXTRA, names // _EXTRA % (_COPY // _EXTRA) == 1
        keys = SampleRNG.of_samples(stream.seed, names).stream("augment", epoch).bits().tolist()
        x = torch.empty(len(names), 3, *stream.preprocess.shape)
        y = torch.empty(len(names), dtype=torch.int64)
        for source, labels, chosen in zip((own, stream.extra), self.labels, (~extra, extra), strict=True):
            places = chosen.nonzero()[:, 0].tolist()
            if not places or source is None or labels is None:
                continue
            wanted = rows[places].tolist()
            for place, row, image in zip(places, wanted, source.read(wanted), strict=True):
                if isinstance(image, Exception):
                    raise UserError(
                        f"training image {row} ({source.name(row)}) cannot be read: {image}. Replace it or take it out."
                    ) from image
                torch.div(stream.augment(image, keys[place] % 2**63), 255, out=x[place])
            y[places] = labels[rows[places]]
        return Part(names, x, y)
