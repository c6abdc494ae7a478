"""Training images: augmentation, and the images of a step as a pure function of (seed, step), also after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, Mixup
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as pictures

from vitadel.data.batches import BadSample, Preprocess, copied_to, to_unit_range
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.training.device_augmentation import DeviceAugmentation, DrawnAugmentation
from vitadel.training.recipes.training_sections import Augmentation
from vitadel.types import Source

Augment = Callable[[Image.Image, int], Tensor]
"""(image, seed) -> uint8 pixels of the model's size."""


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python; timm's transforms draw from the latter two."""
    torch.manual_seed(seed)
    _seed_transforms(seed)


def _seed_transforms(seed: int) -> None:
    """Seed what transforms of one image draw from. torch.manual_seed seeds all devices: milliseconds for each image."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def make_augment(section: Augmentation, preprocess: Preprocess) -> Augment:
    """The transforms in timm's order: crop, flip, rotation, RandAugment, color jitter, random erasing.

    timm drops color jitter beside RandAugment without a word; here what a recipe asks for is done.
    Erasing fills with the mean color: noise around zero, as in timm, is meant for normalized images and would leave the
    range of pixels. With `on_device`, images are only resized here: `make_device_augmentation` has the rest.
    """
    if section.on_device:
        return _Resized(preprocess)
    how = v2.InterpolationMode(section.interpolation)
    steps: list[Callable[..., object]] = []
    if section.crop == "resized":
        steps.append(
            v2.RandomResizedCrop(preprocess.shape, section.scale, section.ratio, interpolation=how, antialias=True)
        )
    else:
        steps.append(preprocess)
    if section.crop == "pad":
        steps.append(v2.RandomCrop(preprocess.shape, padding=section.padding))
    if section.hflip:
        steps.append(v2.RandomHorizontalFlip(section.hflip))
    if section.rotation:
        steps.append(v2.RandomRotation(section.rotation, interpolation=v2.InterpolationMode.BILINEAR))
    color = _mean_color(preprocess)
    if section.auto_augment:
        steps += [_as_picture, rand_augment_policy(section.auto_augment, color)]
    if section.color_jitter:
        steps.append(v2.ColorJitter(*[section.color_jitter] * 3))
    steps.append(_as_pixels)
    if section.reprob:
        steps.append(v2.RandomErasing(section.reprob, value=list(color)))
    return _Transforms(tuple(steps))


def _mean_color(preprocess: Preprocess) -> tuple[int, int, int]:
    red, green, blue = preprocess.mean if any(preprocess.mean) else IMAGENET_DEFAULT_MEAN
    return round(255 * red), round(255 * green), round(255 * blue)


def make_device_augmentation(section: Augmentation, preprocess: Preprocess) -> DeviceAugmentation | None:
    """The same transforms, for whole batches on their device; None if the recipe leaves them to the reading."""
    if not section.on_device:
        return None
    return DeviceAugmentation(
        preprocess.shape,
        _mean_color(preprocess),
        padding=section.padding if section.crop == "pad" else 0,
        hflip=section.hflip,
        color_jitter=section.color_jitter,
        reprob=section.reprob,
    )


def make_plain(section: Augmentation, preprocess: Preprocess) -> Augment | None:
    """The first copy of a batch that is repeated: resized only. None if batches are not repeated."""
    repeated = section.repeated_aug_by == "batches" and section.repeated_aug > 1
    return _Resized(preprocess) if repeated else None


def rand_augment_policy(text: str, fill: tuple[int, ...] = ()) -> Callable[..., object]:
    """timm's RandAugment by its notation; what a transform uncovers gets the color `fill`."""
    try:
        policy: Callable[..., object] = rand_augment_transform(text, {"img_mean": fill})
        return policy
    except Exception as error:  # timm checks with assertions and lookups of many kinds
        raise UserError(f"timm cannot read '{text}' ({error!r}); write it like rand-m9-mstd0.5-inc1") from error


@dataclass(frozen=True)
class _Resized:
    """No augmentation, which needs no seed."""

    preprocess: Preprocess

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        return self.preprocess(image)


@dataclass(frozen=True)
class _Transforms:
    """Transforms in sequence; a class, because spawned worker processes pickle it."""

    steps: tuple[Callable[..., object], ...]

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        _seed_transforms(seed)
        result: object = image
        for step in self.steps:
            result = step(result)
        assert isinstance(result, Tensor)
        return result


def _as_picture(image: Image.Image | Tensor) -> Image.Image:
    picture: Image.Image = pictures.to_pil_image(image) if isinstance(image, Tensor) else image
    return picture


def _as_pixels(image: Image.Image | Tensor) -> Tensor:
    pixels: Tensor = image if isinstance(image, Tensor) else pictures.pil_to_tensor(image)
    return pixels


def make_mixup(section: Augmentation, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's MixUp and CutMix of a batch, which turn labels into probabilities; None if the recipe has neither."""
    if not (section.mixup or section.cutmix):
        return None
    mixup: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = Mixup(
        mixup_alpha=section.mixup,
        cutmix_alpha=section.cutmix,
        prob=section.mixup_prob,
        switch_prob=section.mixup_switch_prob,
        label_smoothing=0.0,
        num_classes=num_classes,
    )
    return mixup


_EXTRA = 1 << 40  # offset of the names of the second source's samples
_COPY = 1 << 44  # offset of the names of a sample's further versions
_REPLACEMENTS = 100  # images that are tried in place of one that cannot be read
_PASSES = 1 << 15  # versions of the second source's samples with names of their own


def derive_seed(seed: int, name: str, *numbers: int) -> int:
    """A seed for another generator, e.g. torch's, for one purpose and moment."""
    return int(SampleRNG.of_samples(seed, [0]).stream(name, *numbers).bits()[0]) % 2**62


def _augmentation_seeds(seed: int, names: Tensor, epoch: int) -> list[int]:
    """A seed for each image of an epoch, wherever it is augmented."""
    return [bits % 2**63 for bits in SampleRNG.of_samples(seed, names).stream("augment", epoch).bits().tolist()]


@dataclass(frozen=True)
class MicroBatch:
    """The images one process sees at once. Random numbers of a sample are keyed by its name in `names`.

    Pixels are bytes until they are on their device, where they get the augmentation that is left for it and become
    floats in [0, 1].
    """

    names: Tensor
    x: Tensor
    y: Tensor
    bad: tuple[BadSample, ...] = ()  # images that could not be read, in whose place are others
    plain: bool = False  # not augmented, and not to be mixed
    drawn: DrawnAugmentation | None = None  # what is left to do on the device

    def sent(self, device: torch.device) -> MicroBatch:
        """The bytes on their device, as they are."""
        if self.drawn is None:
            x, y = copied_to(device, self.x, self.y)
            return replace(self, x=x, y=y)
        x, y, table = copied_to(device, self.x, self.y, self.drawn.table)
        return replace(self, x=x, y=y, drawn=replace(self.drawn, table=table))

    def to(self, device: torch.device) -> MicroBatch:
        there = self if self.x.device.type == device.type else self.sent(device)
        x = there.x if there.drawn is None else there.drawn.augmentation.apply(there.x, there.drawn.table)
        return replace(there, x=to_unit_range(x), drawn=None)


@dataclass(frozen=True)
class _Pool:
    """Usable samples of a source, shuffled for every pass; with a `buffer`, almost in the order of the source.

    Blocks of `buffer` samples are then in random order, and a sample moves by less than `buffer` places from there.
    What is read at any time lies in three blocks, so that files which are read in order need not be opened at random.
    """

    rows: Tensor
    buffer: int | None = None
    orders: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def take(self, first: int, count: int, seed: int, name: str) -> Tensor:
        """Rows number `first`, `first + 1`, ... of an endless sequence of passes."""
        places = torch.arange(first, first + count)
        passes = places // len(self.rows)
        taken = torch.empty(count, dtype=torch.int64)
        for turn in passes.unique().tolist():
            if turn not in self.orders:
                self.orders.clear()
                self.orders[turn] = self._order(seed, name, turn)
            here = passes == turn
            taken[here] = self.rows[self.orders[turn][places[here] % len(self.rows)]]
        return taken

    def _order(self, seed: int, name: str, turn: int) -> Tensor:
        """Positions of a pass in their order, a pure function of the seed and the number of the pass."""
        rng = SampleRNG.of_samples(seed, self.rows).stream(name, turn)
        if self.buffer is None:
            return rng.bits().argsort(stable=True)
        block = torch.arange(len(self.rows)) // self.buffer
        blocks = SampleRNG.of_samples(seed, range(int(block[-1]) + 1)).stream(f"{name} of blocks", turn)
        in_blocks = blocks.bits().argsort(stable=True).argsort()[block].argsort(stable=True)
        place = torch.arange(len(self.rows)) + self.buffer * rng.uniform()[in_blocks].double()
        return in_blocks[place.argsort(stable=True)]


@dataclass(frozen=True)
class DataStream:
    """Training images in batches of `batch_size` over all processes, with `parts` micro-batches per process.

    An epoch is one pass over the first source, without the last incomplete batch. A share `extra_share` of each batch
    comes from the second source, if there is one. With `repeats` an epoch has that many versions of as many fewer
    images; with `plain` as well, every batch is seen that many times instead, first as `plain` makes its images. In the
    first `easier_epochs` images of the first source are read from `easier`, under the same names. With a `buffer`
    images are shuffled among about so many neighbors only. What `on_device` does is drawn in this process, and done
    when a micro-batch is copied to its device.
    """

    source: Source
    rows: Tensor
    preprocess: Preprocess
    augment: Augment
    batch_size: int
    seed: int = 0
    repeats: int = 1
    plain: Augment | None = None
    extra: Source | None = None
    extra_rows: Tensor | None = None
    extra_share: float = 0.5
    easier: Source | None = None
    easier_epochs: int = 0
    parts: int = 1
    rank: int = 0
    processes: int = 1
    workers: int = 0
    skip_bad: bool = False
    buffer: int | None = None
    on_device: DeviceAugmentation | None = None

    def __post_init__(self) -> None:
        if self.batch_size % (self.parts * self.processes):
            raise UserError(
                f"a batch of {self.batch_size} images cannot be split equally between {self.processes} processes with "
                f"{self.parts} micro-batches each; set train.batch_size to a multiple of {self.parts * self.processes}"
            )
        if self.steps_per_epoch < 1:
            raise UserError(
                f"a batch takes {self._own} training images, but there are only {len(self.rows)}; choose a smaller "
                "train.batch_size, a larger data.limit or fewer held_out images"
            )
        if self.plain is not None and self.extra is not None:
            raise UserError(
                "batches that are repeated (augmentation.repeated_aug_by: batches) have images of one source only; "
                "leave out data.extra, or set repeated_aug_by: images"
            )

    @property
    def _extra(self) -> int:
        return 0 if self.extra is None else round(self.batch_size * self.extra_share)

    @property
    def _own(self) -> int:
        return self.batch_size - self._extra

    @property
    def steps_per_epoch(self) -> int:
        return len(self.rows) // self._own * self._times

    @property
    def _times(self) -> int:
        """How often each batch is seen."""
        return 1 if self.plain is None else self.repeats

    def names(self, step: int) -> Tensor:
        """Names of the images of a step, all processes: rows, with offsets for the second source and for versions."""
        epoch, turn = divmod(step, self.steps_per_epoch)
        batch, copy = divmod(turn, self._times)
        versions = 1 if self.plain is not None else self.repeats
        place = torch.arange(batch * self._own, (batch + 1) * self._own)
        pool = self._pools[0]
        first = int(place[0]) // versions
        rows = pool.take(epoch * len(pool.rows) + first, int(place[-1]) // versions - first + 1, self.seed, "order")
        names = rows[place // versions - first] + (place % versions + copy) * _COPY
        if not self._extra:
            return names
        place = torch.arange(step * self._extra, (step + 1) * self._extra)
        passes = place // len(self._pools[1].rows) % _PASSES  # further passes are versions, too
        more = self._pools[1].take(int(place[0]), self._extra, self.seed, "extra order") + _EXTRA + passes * _COPY
        # Shuffled, so that every process gets its share of both.
        order = SampleRNG.of_samples(self.seed, [step]).stream("mix").permutation(self.batch_size)[0]
        return torch.cat([names, more])[order]

    @cached_property
    def _pools(self) -> tuple[_Pool, _Pool]:
        extra = self.rows if self.extra_rows is None else self.extra_rows
        return _Pool(self.rows, self.buffer), _Pool(extra, self.buffer)

    def steps(self, first: int, last: int) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of steps `first` to `last - 1`; earlier images are not read."""
        dataset = _Reader(self)
        size = self.batch_size // (self.parts * self.processes)

        def requests() -> Iterator[list[tuple[int, int]]]:
            for step in range(first, last):
                mine = self.names(step).view(self.processes, self.parts, size)[self.rank]
                epoch = step // self.steps_per_epoch
                for part in mine:
                    yield [(name, epoch) for name in part.tolist()]

        loader: DataLoader[MicroBatch | UserError] = DataLoader(
            cast("Dataset[MicroBatch | UserError]", dataset),
            batch_sampler=cast("Iterable[list[int]]", requests()),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            prefetch_factor=2 if self.workers else None,
        )
        read: Iterable[MicroBatch | UserError] = loader
        if dataset.places is not None:
            read = dataset.places.watch(loader, dataset.name, "set a smaller data.workers")
        parts: list[MicroBatch] = []
        for place, part in enumerate(read):
            if isinstance(part, UserError):  # raised here, as a worker process would wrap it in a traceback
                raise part
            parts.append(self._with_draws(part, (first + place // self.parts) // self.steps_per_epoch))
            if len(parts) == self.parts:
                yield parts
                parts = []

    def _with_draws(self, part: MicroBatch, epoch: int) -> MicroBatch:
        """The micro-batch with what was drawn for its device; drawn here, so that workers send pixels only."""
        if self.on_device is None or part.plain:
            return part
        return replace(part, drawn=self.on_device.draw(_augmentation_seeds(self.seed, part.names, epoch)))


def _as_it_is(part: Any) -> Any:
    return part


class _Reader:
    """The data set of torch's loader, in this process or in workers; a request is (name, epoch)."""

    def __init__(self, stream: DataStream) -> None:
        self.stream, self.places = stream, None
        if stream.workers:
            from vitadel.data.worker_processes import Places

            self.places = Places(stream.workers)
        self.labels = (stream.source.labels(), None if stream.extra is None else stream.extra.labels())

    def __len__(self) -> int:
        return len(self.stream.rows)

    def name(self, sample: int) -> str:
        """The source's name of the sample of that name in a micro-batch."""
        source = self.stream.extra if sample // _EXTRA % (_COPY // _EXTRA) == 1 else self.stream.source
        return "" if source is None else source.name(sample % _EXTRA)

    def __getitem__(self, request: tuple[int, int]) -> MicroBatch | UserError:
        return self.__getitems__([request])

    def __getitems__(self, requests: Sequence[tuple[int, int]]) -> MicroBatch | UserError:
        try:
            return self._read(requests)
        except UserError as error:
            return error

    def _read(self, requests: Sequence[tuple[int, int]]) -> MicroBatch:
        stream, epoch = self.stream, requests[0][1]
        own = stream.easier if stream.easier is not None and epoch < stream.easier_epochs else stream.source
        names = torch.tensor([name for name, _ in requests])
        rows, extra = names % _EXTRA, names // _EXTRA % (_COPY // _EXTRA) == 1
        plain = stream.plain if int(names[0]) < _COPY else None
        augment = plain or stream.augment
        seeds = _augmentation_seeds(stream.seed, names, epoch)
        x = torch.empty(len(names), 3, *stream.preprocess.shape, dtype=torch.uint8)
        y = torch.empty(len(names), dtype=torch.int64)
        bad: list[BadSample] = []
        for source, labels, chosen in zip((own, stream.extra), self.labels, (~extra, extra), strict=True):
            places = chosen.nonzero()[:, 0].tolist()
            if not places or source is None or labels is None:
                continue
            wanted = rows[places].tolist()
            for place, row, image in zip(places, wanted, self._images(source, wanted, names[places]), strict=True):
                if isinstance(image, Exception):
                    name = int(names[place]) % _COPY
                    bad.append(BadSample(name, source.name(row), str(image)))
                    rows[place], image = self._replacement(source, name, bad[-1])
                x[place] = augment(image, seeds[place])
            y[places] = labels[rows[places]]
        return MicroBatch(names, x, y, tuple(bad), plain is not None)

    def _images(self, source: Source, rows: Sequence[int], names: Tensor) -> Iterator[Image.Image | Exception]:
        """The images of a source; in a worker process one by one, so that its place is known if it dies."""
        if self.places is None:
            yield from source.read(rows)
            return
        for row, name in zip(rows, names.tolist(), strict=True):
            self.places.enter(name)
            yield from source.read([row])

    def _replacement(self, source: Source, name: int, bad: BadSample) -> tuple[int, Image.Image]:
        """Another row of the same source and its image, which depend on the seed and the unreadable sample only."""
        stream = self.stream
        if not stream.skip_bad:
            raise UserError(
                f"training image {name % _EXTRA} ({bad.name}) cannot be read: {bad.reason}. Replace or remove it, or "
                "continue with --resume and data.skip_bad=true: another image then takes its place."
            )
        pool = stream._pools[name // _EXTRA].rows
        rng = SampleRNG.of_samples(stream.seed, [name])
        for trial in range(_REPLACEMENTS):
            row = int(pool[int(rng.stream("replacement", trial).bits()[0]) % len(pool)])
            image = source.read([row])[0]
            if not isinstance(image, Exception):
                return row, image
        raise UserError(f"{_REPLACEMENTS} training images in a row cannot be read, the first {bad.name}: {bad.reason}.")


_Step = list[MicroBatch]


@dataclass
class StepsAhead:
    """The steps of a stream, of which `fetch` reads the next one and starts its copies to the device.

    A step that is not fetched is read when it is asked for, as all are on a CPU, where reading ahead saves no time.
    What goes wrong in reading is raised when the step is asked for: the one before it can still be finished.
    """

    steps: Iterator[_Step]
    device: torch.device
    fetched: list[_Step | Exception] = field(default_factory=list)

    def fetch(self) -> None:
        if self.device.type == "cpu" or self.fetched:
            return
        step: _Step | Exception
        try:
            step = [part.sent(self.device) for part in next(self.steps, [])]
        except Exception as fault:
            step = fault
        self.fetched.append(step)

    def __iter__(self) -> Iterator[_Step]:
        while step := self.fetched.pop() if self.fetched else next(self.steps, []):
            if isinstance(step, Exception):
                raise step
            yield step
