"""Distorted copies of training images by AugMix (Hendrycks et al., ICLR 2020), as a substitute for DeepAugment's.

AFAT trains on CIFAR beside two copies of every image that DeepAugment's networks distort. Those networks are in no
package, so this is another augmentation in the same layout: one folder per class, named by its number. Results with it
are not comparable with the paper's, and the copy's results say so.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import AugMix

from vitadel.data.batches import skip_advice
from vitadel.errors import UserError, check_known
from vitadel.evaluation.corruptions.corrupted_copy import encoded, images_to_copy, samples_left_out
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, result_header
from vitadel.evaluation.engine.target import sample_fingerprint
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import RESUMED, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically
from vitadel.types import Source

FORMATS = {"png": ".png", "jpeg": ".jpg"}
NOTE = "AugMix, a substitute for DeepAugment: results are not comparable with AFAT's"


@dataclass(frozen=True)
class AugmixCopyRequest(RunRequest):
    """`copies` distorted versions of every image, at its own size; `format` is png or jpeg."""

    copies: int = 2
    format: str = "png"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("format", self.format, FORMATS)
        if not 1 <= self.copies <= 99:
            raise UserError(f"--augmix is the number of copies of each image, from 1 to 99; got {self.copies}")


def write_augmix_copy(
    source: Source, spec: str, request: AugmixCopyRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Write the copies into a run folder, below one folder per class; files that are there are not written again."""
    indices, mislabeled = images_to_copy(source, request)
    settings = {
        "data": spec,
        "data_fingerprint": sample_fingerprint(indices, source.labels()),
        **dataclasses.asdict(request),
        "augmentation": "augmix",
    }

    def work(run: Run) -> dict[str, Any]:
        start = time.perf_counter()
        unread = _write(source, request, indices, run, processes)
        if run.costs is not None:
            run.costs.seconds["augmix"] = time.perf_counter() - start
        processes.wait()
        lost = [*(sample.name for sample in mislabeled), *map(source.name, unread)]
        return {
            **result_header(request.seed),
            "data": {"spec": spec, "n": len(indices) - len(unread), **samples_left_out(source, lost)},
            "augmix": {"copies": request.copies, "format": request.format, "note": NOTE},
        }

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        return write_augmix_copy(source, spec, dataclasses.replace(request, limit=few), alone, **watched)

    trial = Trial(len(indices), on_few)
    return execute("corrupt", spec, settings, processes, work, trial=trial, **options)


def _write(source: Source, request: AugmixCopyRequest, indices: Tensor, run: Run, processes: Processes) -> list[int]:
    """Write the files of this process; samples that cannot be read, of all processes."""
    labels, digits = source.labels(), len(str(len(source.classes) - 1))
    ending = FORMATS[request.format]

    def paths(index: int) -> list[Path]:
        folder = run.path / f"{int(labels[index]):0{digits}d}"
        return [folder / f"{index:08d}-augmix-{copy}{ending}" for copy in range(1, request.copies + 1)]

    mine = indices[processes.rank :: processes.count].tolist()
    todo = [index for index in mine if not all(path.exists() for path in paths(index))]
    shown = run.show_progress and processes.is_main
    with progress("augmix", len(mine), shown, run.expected.get("augmix")) as meter:
        if len(todo) < len(mine):
            meter.advance(len(mine) - len(todo), RESUMED)
        for start in range(0, len(todo), request.batch_size):
            part = todo[start : start + request.batch_size]
            for index, image in zip(part, source.read(part), strict=True):
                if isinstance(image, Exception):
                    _refuse_unless_skipped(source, index, image, request.skip_bad)
                    continue
                versions = distorted(image, index, request.copies, request.seed)
                for path, pixels in zip(paths(index), versions, strict=True):
                    write_atomically(path, encoded(pixels, request.format))
            meter.advance(len(part))
    processes.wait()
    unread = [index for index in indices.tolist() if not all(path.exists() for path in paths(index))]
    if len(unread) == len(indices):
        raise UserError("no sample could be read, so the copy is empty; check the files of the data")
    return unread


def _refuse_unless_skipped(source: Source, index: int, fault: Exception, skip_bad: bool | None) -> None:
    if not skip_bad:
        raise UserError(
            f"sample {index} ({source.name(index)}) cannot be read: {fault}. Replace it"
            f"{skip_advice(skip_bad, ', or skip and count such samples')}"
        )


def distorted(image: Image.Image, index: int, copies: int, seed: int) -> Iterator[np.ndarray]:
    """Versions of an image by torchvision's AugMix, each a function of (seed, sample, copy)."""
    keys = SampleRNG.of_samples(seed, [index]).stream("augmix").bits(copies)[0].tolist()
    for key in keys:
        # AugMix draws from torch's global generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            yield np.asarray(AugMix()(image))
