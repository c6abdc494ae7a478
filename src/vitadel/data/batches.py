"""From a source to batches of pixels: choose samples, bring them to the model's size, read them one batch ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import are_numbers
from vitadel.runtime.distributed import is_gpu
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Source

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")

_Outcome = tuple[int, Tensor | Exception]
_Chunks = Generator[tuple[list[int], Tensor] | list[_Outcome], None, None]
"""All images of a chunk in one tensor, with their indices, or one by one."""


@dataclass(frozen=True)
class BadSample:
    """A sample that cannot be used, and why."""

    index: int
    name: str
    reason: str


def skip_advice(skip_bad: bool | None, words: str) -> str:
    """Advice to skip bad samples: `words` and the flag, or nothing if the caller has no such flag (None)."""
    return "" if skip_bad is None else f"{words} with --skip-bad"


def check_labels(
    source: Source, num_classes: int, *, skip_bad: bool | None = None, fixed: bool = False
) -> tuple[BadSample, ...]:
    """Samples whose label is not one of the model's classes: a user error, or with `skip_bad` the list to skip.

    Label -1 marks a sample whose label is missing or cannot be read. `fixed`: no flag can change the model's number of
    classes.
    """
    labels = source.labels()
    bad = ((labels < 0) | (labels >= num_classes)).nonzero()[:, 0].tolist()
    if skip_bad and len(bad) < len(labels):
        return tuple(BadSample(index, source.name(index), _fault(int(labels[index]), num_classes)) for index in bad)
    if not bad:
        return ()
    first = bad[0]
    setting = "" if fixed else f", or with --weights random set --num-classes {len(source.classes)}"
    advice = (
        f"the data has {len(source.classes)} classes and the model {num_classes}: take a model for this data{setting}"
        if len(source.classes) != num_classes
        else "correct the labels"
    )
    all_bad = len(bad) == len(labels)
    remedy = "" if all_bad else skip_advice(skip_bad, ", or skip and count such samples")
    raise UserError(
        f"sample {first} ({source.name(first)}): {_fault(int(labels[first]), num_classes)}. "
        f"This concerns {len(bad)} of {len(labels)} samples; {advice}{remedy}"
    )


def skipped(source: Source) -> tuple[str, ...]:
    """What was skipped when the source was opened with `skip_bad`, one sentence each."""
    return tuple(getattr(source, "skipped", ()))


def _fault(label: int, num_classes: int) -> str:
    if label == -1:
        return "has no label that can be read"
    return f"label {label} is outside 0..{num_classes - 1}"


def balanced_subset(labels: Tensor, limit: int | None, seed: int, indices: Tensor | None = None) -> Tensor:
    """Stable indices of `limit` samples, ascending; class counts differ by at most one, unless a class runs out.

    `labels` holds usable labels only; if samples were skipped, `indices` gives the stable index of each label (default:
    its position), so that the draw of the others does not change. The choice is nested: a larger limit keeps every
    sample of a smaller one.
    """
    index = torch.arange(len(labels)) if indices is None else indices.to(torch.int64)
    if limit is not None and limit < 1:
        raise UserError(f"the limit must be at least 1, got {limit}; leave it out to take all {len(labels)} samples")
    if limit is None or limit >= len(labels):
        return index.sort().values
    assert int(labels.min()) >= 0, "samples without a usable label must be skipped first"
    chance = SampleRNG.of_samples(seed, index).stream("subset").bits()
    order = chance.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by class, in random order within each

    names = (counts := labels.bincount()).nonzero()[:, 0]
    sizes = counts[names]
    start = sizes.cumsum(0) - sizes
    turn = torch.arange(len(labels)) - start.repeat_interleave(
        sizes
    )  # the k-th sample of every class is taken in turn k
    priority = SampleRNG.of_samples(seed, names).stream("subset classes").bits().argsort(stable=True).argsort()
    by_priority = priority.repeat_interleave(sizes).argsort(stable=True)
    taken = by_priority[turn[by_priority].argsort(stable=True)][:limit]
    return index[order[taken]].sort().values


def check_same_classes(source: Source, training: Source, what: str) -> None:
    """Check that labels mean the same as in data.train; data sets that only number their classes are not checked."""
    theirs, ours = list(source.classes), list(training.classes)
    if len(theirs) != len(ours):
        raise UserError(f"{what} has {len(theirs)} classes and data.train {len(ours)}; they must be the same")
    if are_numbers(theirs) or are_numbers(ours):
        return
    for number, (there, here) in enumerate(zip(theirs, ours, strict=True)):
        if there != here:
            raise UserError(
                f"{what}: its class {number} is '{there}', that of data.train is '{here}'; labels would not mean the "
                "same"
            )


def usable_rows(source: Source, classes: int) -> Tensor:
    """The samples with a label of one of the classes."""
    labels = source.labels()
    return ((labels >= 0) & (labels < classes)).nonzero()[:, 0]


def split_rows(
    labels: Tensor, rows: Tensor, held_out: int, limit: int | None, seed: int, limit_seed: int
) -> tuple[Tensor, Tensor]:
    """Rows to train on, `limit` or all, and rows held out, which do not depend on `limit`; both class-balanced."""
    if held_out >= len(rows):
        raise UserError(f"data.held_out is {held_out}, but data.train has only {len(rows)} images; hold out fewer")
    aside = balanced_subset(labels[rows], held_out, seed + 1, rows)
    rest = rows[~torch.isin(rows, aside)]
    return balanced_subset(labels[rest], limit, limit_seed, rest), aside


@dataclass(frozen=True)
class Preprocess:
    """Resize to size / crop_pct, then crop the center; an image of the given size is not changed.

    The exception keeps 32-pixel sets on 32-pixel models unchanged, bit for bit, for any `crop_pct`. `size` is one
    number or (height, width). `crop_mode`: 'center' keeps the aspect ratio and drops the edges, 'squash' changes the
    aspect ratio, 'border' pads with the `mean` color.
    """

    size: tuple[int, int] | int
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise UserError(f"the image size must be positive, got {self.size}")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must be in (0, 1], got {self.crop_pct}")
        for what, given, known in (
            ("interpolation", self.interpolation, _INTERPOLATIONS),
            ("crop_mode", self.crop_mode, _CROP_MODES),
        ):
            if given not in known:
                raise UserError(f"unknown {what} '{given}'; known: {', '.join(known)}{nearest_names(given, known)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def about(self) -> str:
        """A description, for images of another size."""
        height, width = self.shape
        tall, wide = (math.floor(side / self.crop_pct) for side in self.shape)
        size = f"{tall} pixels" if tall == wide else f"{tall} x {wide} pixels"
        how = {"center": f"shorter side to {size}", "squash": f"squashed to {tall} x {wide} pixels"}
        first = how.get(self.crop_mode, f"longer side to {size}, then padded")
        return f"{first} ({self.interpolation}), then the central {height} x {width}"

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform an RGB image to uint8 of shape (3, height, width)."""
        if (image.height, image.width) == self.shape:
            return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()
        return _transform(self)(image)


@lru_cache(maxsize=16)
def _transform(settings: Preprocess) -> Callable[[Image.Image], Tensor]:
    from timm.data import create_transform  # here, as importing timm takes seconds and 32-pixel sets do not need it

    transform = create_transform(
        input_size=(3, *settings.shape),
        is_training=False,
        crop_pct=settings.crop_pct,
        crop_mode=settings.crop_mode,
        interpolation=settings.interpolation,
        mean=settings.mean,
        normalize=False,
    )
    return cast("Callable[[Image.Image], Tensor]", transform)


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples in the requested order, without the bad ones; empty if all of them are bad."""

    indices: Tensor
    x: Tensor  # float32 in [0, 1], (n, 3, height, width)
    y: Tensor
    bad: tuple[BadSample, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """Move pixels and labels to a device; indices stay on the CPU, where sources use them."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def to_unit_range(pixels: Tensor) -> Tensor:
    """8-bit pixels as float32 in [0, 1], where they are; floats as they are.

    The divisor is a tensor of the same device: CUDA multiplies by the reciprocal of a number, which rounds otherwise.
    Converted first, as a division of bytes by a float takes the CPU four times as long.
    """
    if pixels.dtype != torch.uint8:
        return pixels
    return pixels.float().div_(torch.full((), 255.0, device=pixels.device))


def copied_to(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Tensors on a device; copies to a GPU start from pinned memory and are not waited for."""
    if not is_gpu(device):
        return [each.to(device) for each in tensors]
    return [each.pin_memory().to(device, non_blocking=True) for each in tensors]


def read_batches(
    source: Source,
    chunks: Iterable[Sequence[int]],
    preprocess: Preprocess,
    *,
    threads: int = 2,
    skip_bad: bool | None = None,
    device: torch.device | None = None,
    workers: int = 0,
) -> Iterator[Batch]:
    """Yield one batch per chunk of stable indices, in order, while at most one further batch is being decoded.

    The threads stop when the caller stops early, also by an exception. A sample that cannot be read is a user error;
    with `skip_bad` it is skipped and listed in `bad`. Pixels go to the `device` as bytes, one batch ahead. With
    `workers`, so many processes read instead of the threads.
    """
    if threads < 1:
        raise UserError(f"threads must be at least 1, got {threads}")
    if workers:
        from vitadel.data.worker_processes import read_in_processes

        read = read_in_processes(PixelReader(source, preprocess), chunks, workers)
    else:
        read = _read_ahead(source, chunks, preprocess, threads)
    batches = _batches(source, read, preprocess.shape, skip_bad)
    return (replace(batch, x=to_unit_range(batch.x)) for batch in _on_device(batches, device or torch.device("cpu")))


def _on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device; the copy of each starts before the one before it is used."""
    ahead: Batch | None = None
    for batch in batches:
        if device.type == "cpu":
            yield batch
            continue
        x, y = copied_to(device, batch.x, batch.y)
        current, ahead = ahead, replace(batch, x=x, y=y)
        if current is not None:
            yield current
    if ahead is not None:
        yield ahead


def _batches(source: Source, chunks: _Chunks, shape: tuple[int, int], skip_bad: bool | None) -> Iterator[Batch]:
    """Batches as they are read: 8-bit pixels if all images of a batch have them, else floats."""
    labels = source.labels()
    with closing(chunks):
        for chunk in chunks:
            if isinstance(chunk, tuple):
                indices = torch.tensor(chunk[0], dtype=torch.int64)
                pixels = chunk[1]
                yield Batch(indices, pixels if pixels.dtype == torch.uint8 else pixels.float(), labels[indices])
                continue
            good = [(index, outcome) for index, outcome in chunk if isinstance(outcome, Tensor)]
            bad = tuple(
                BadSample(index, source.name(index), str(outcome) or type(outcome).__name__)
                for index, outcome in chunk
                if isinstance(outcome, Exception)
            )
            if bad and not skip_bad:
                raise UserError(
                    f"sample {bad[0].index} ({bad[0].name}) cannot be read: {bad[0].reason}. "
                    f"Replace it{skip_advice(skip_bad, ', or skip and count such samples')}"
                )
            indices = torch.tensor([index for index, _ in good], dtype=torch.int64)
            whole = all(pixels.dtype == torch.uint8 for _, pixels in good)
            x = torch.empty(len(good), 3, *shape, dtype=torch.uint8 if whole else torch.float32)
            for row, (_, pixels) in enumerate(good):
                x[row] = pixels if whole else to_unit_range(pixels)
            yield Batch(indices, x, labels[indices], bad)


def read_pixels(source: Source, part: Sequence[int], preprocess: Preprocess) -> list[_Outcome]:
    """Each index of `part` with its pixels, or with the reason why there are none."""
    exactly = getattr(source, "read_exactly", None)  # images in memory may be floats
    exact = None if exactly is None else exactly(part, preprocess.shape)
    if exact is not None:
        return list(zip(part, exact, strict=True))
    outcomes: list[_Outcome] = []
    for index, image in zip(part, source.read(part), strict=True):
        try:
            outcomes.append((index, image if isinstance(image, Exception) else preprocess(image)))
        except Exception as fault:  # an image that cannot be resized is as bad as one that cannot be opened
            outcomes.append((index, fault))
    return outcomes


@dataclass(frozen=True)
class PixelReader:
    """`read_pixels` of one source, for worker processes."""

    source: Source
    preprocess: Preprocess

    def name(self, index: int) -> str:
        return self.source.name(index)

    def __call__(self, part: Sequence[int]) -> list[_Outcome]:
        return read_pixels(self.source, part, self.preprocess)


def _read_ahead(source: Source, chunks: Iterable[Sequence[int]], preprocess: Preprocess, threads: int) -> _Chunks:
    def submit(chunk: Sequence[int]) -> list[Future[list[_Outcome]]]:
        indices = [int(index) for index in chunk]
        size = max(1, -(-len(indices) // threads))
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        return [pool.submit(read_pixels, source, part, preprocess) for part in parts]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="vitadel-read")
    try:
        ahead: list[Future[list[_Outcome]]] | None = None
        for chunk in chunks:
            current, ahead = ahead, submit(chunk)
            if current is not None:
                yield [outcome for future in current for outcome in future.result()]
        if ahead is not None:
            yield [outcome for future in ahead for outcome in future.result()]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
