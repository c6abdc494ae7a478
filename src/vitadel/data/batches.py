"""Read batches of pixels in threads, one batch ahead of the caller."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitadel.data.preprocess import Preprocess
from vitadel.data.selection import BadSample, skip_advice
from vitadel.errors import UserError
from vitadel.types import Source

_Outcome = tuple[int, Tensor | Exception]
_Chunks = Generator[list[_Outcome], None, None]


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


def read_batches(
    source: Source,
    chunks: Iterable[Sequence[int]],
    preprocess: Preprocess,
    *,
    threads: int = 2,
    skip_bad: bool | None = None,
) -> Iterator[Batch]:
    """Yield one batch per chunk of stable indices, in order, while at most one further batch is being decoded.

    The threads stop when the caller stops early, also by an exception. A sample that cannot be read is a user error;
    with `skip_bad` it is skipped and listed in `bad`.
    """
    if threads < 1:
        raise UserError(f"threads must be at least 1, got {threads}")
    return _batches(source, _read_ahead(source, chunks, preprocess, threads), preprocess.shape, skip_bad)


def _batches(source: Source, chunks: _Chunks, shape: tuple[int, int], skip_bad: bool | None) -> Iterator[Batch]:
    labels = source.labels()
    with closing(chunks):
        for chunk in chunks:
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
            x = torch.empty(len(good), 3, *shape)
            for row, (_, pixels) in enumerate(good):
                if pixels.dtype == torch.uint8:
                    torch.div(pixels, 255, out=x[row])
                else:
                    x[row] = pixels
            yield Batch(indices, x, labels[indices], bad)


def _read_ahead(source: Source, chunks: Iterable[Sequence[int]], preprocess: Preprocess, threads: int) -> _Chunks:
    def work(part: Sequence[int]) -> list[_Outcome]:
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

    def submit(chunk: Sequence[int]) -> list[Future[list[_Outcome]]]:
        indices = [int(index) for index in chunk]
        size = max(1, -(-len(indices) // threads))
        return [pool.submit(work, indices[start : start + size]) for start in range(0, len(indices), size)]

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
