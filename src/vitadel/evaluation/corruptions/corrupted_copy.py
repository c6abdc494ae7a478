"""A corrupted copy of a data set on disk: pictures in the layout of ImageNet-C, or arrays in that of CIFAR-C."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitadel.backbones.record import LARGEST_SIDE
from vitadel.corruptions import COMMON, SEVERITIES, corrupt
from vitadel.data import balanced_subset, check_labels, read_batches
from vitadel.data.batches import BadSample, Batch, Preprocess, skipped
from vitadel.data.sources.folders import ImageFiles
from vitadel.errors import UserError, check_known
from vitadel.evaluation.corruptions.request import check_corruptions, check_severities
from vitadel.evaluation.corruptions.sizes import benchmark_preprocess, in_bytes
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, result_header
from vitadel.evaluation.engine.target import sample_fingerprint
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import RESUMED, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import disk_errors_reported, write_atomically
from vitadel.types import Source

FORMATS = ("png", "jpeg", "npy")
_ENDINGS = {"png": ".png", "jpeg": ".JPEG"}
_QUALITY = 85  # of ImageNet-C's own files
_NAMED = 20  # of the images that are left out


@dataclass(frozen=True)
class CorruptedCopyRequest(RunRequest):
    """What to write. `format` png keeps every pixel, jpeg is what ImageNet-C's files went through, npy is CIFAR-C's.

    `size` None keeps images of up to 96 pixels as they are; larger ones are resized to 256 and cropped to 224, as for
    ImageNet-C.
    """

    corruptions: tuple[str, ...] | None = None
    severities: tuple[int, ...] = SEVERITIES
    format: str = "png"
    size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_corruptions(self.corruptions or ())
        check_severities(self.severities)
        if self.corruptions == ():
            raise UserError("no corruption is requested, so there is nothing to write; give some with --corruptions")
        check_known("format", self.format, FORMATS)
        if self.size is not None and not 1 <= self.size <= LARGEST_SIDE:
            raise UserError(f"--size must be from 1 to {LARGEST_SIDE} pixels, got {self.size}. Leave it out for 224.")
        if self.format == "npy" and (self.severities != SEVERITIES or self.skip_bad):
            raise UserError(
                "the arrays of CIFAR-C hold every image at all five severities: drop --severities, --skip-bad"
            )


def versions(batch: Batch, name: str, severities: Sequence[int], seed: int) -> Iterator[tuple[int, Tensor]]:
    """A batch at each severity of a corruption, from the random streams of its samples."""
    rng = SampleRNG.of_samples(seed, batch.indices, batch.x.device)
    for level in severities:
        yield level, corrupt(batch.x, name, level, rng)


def usable_corruptions(asked: Sequence[str] | None, size: tuple[int, int]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The requested corruptions; by default those of the 15 common ones that are available, and why others are not."""
    probe, reasons = Batch(torch.zeros(1, dtype=torch.int64), torch.full((1, 3, *size), 0.5), torch.zeros(1)), {}
    for name in COMMON if asked is None else asked:
        try:
            next(versions(probe, name, SEVERITIES, 0))
        except UserError as error:
            if asked is not None:
                raise
            reasons[name] = str(error)
    return tuple(name for name in (COMMON if asked is None else asked) if name not in reasons), reasons


def images_to_copy(source: Source, request: RunRequest) -> tuple[Tensor, tuple[BadSample, ...]]:
    """The indices of the images, and those left out because of their labels."""
    labels = source.labels()
    mislabeled = check_labels(source, len(source.classes), skip_bad=request.skip_bad)
    bad = {sample.index for sample in mislabeled}
    rows = torch.tensor([row for row in range(len(labels)) if row not in bad], dtype=torch.int64)
    return balanced_subset(labels[rows], request.limit, request.seed, rows), mislabeled


def write_copy(
    source: Source, spec: str, request: CorruptedCopyRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Write the copy into a run folder; files that are already there are not written again."""
    labels = source.labels()
    indices, mislabeled = images_to_copy(source, request)
    _refuse_shared_files(source, indices, request.format)
    preprocess = benchmark_preprocess(source, request.size)
    names, reasons = usable_corruptions(request.corruptions, preprocess.shape)
    settings = {
        "data": spec,
        "data_fingerprint": sample_fingerprint(indices, labels),
        **dataclasses.asdict(request),
        "corruptions": names,
    }

    def work(run: Run) -> dict[str, Any]:
        copy = _Copy(source, request, indices, preprocess, run.path, processes, run.show_progress, run.expected)
        for number, name in enumerate(names):
            start = time.perf_counter()
            if request.format != "npy":
                copy.pictures(name)
            elif number % processes.count == processes.rank:  # a file has one writer
                copy.arrays(name)
            if run.costs is not None:
                run.costs.seconds[name] = time.perf_counter() - start
        processes.wait()
        unread = copy.unwritten(names)
        if request.format == "npy":
            run.write("labels.npy", _npy(labels[indices].repeat(len(SEVERITIES)).numpy()))
        about = {"corruptions": list(names), "size": list(preprocess.shape), "left_out": reasons}
        lost = [*(sample.name for sample in mislabeled), *map(source.name, unread)]
        return _results(spec, source, request, len(indices) - len(unread), lost, about)

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        return write_copy(source, spec, dataclasses.replace(request, limit=few), alone, **watched)

    trial = Trial(len(indices), on_few)
    return execute("corrupt", spec, settings, processes, work, trial=trial, **options)


@dataclass(frozen=True, eq=False)
class _Copy:
    source: Source
    request: CorruptedCopyRequest
    indices: Tensor
    preprocess: Preprocess
    folder: Path
    processes: Processes
    show_progress: bool
    expected: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def _chunks(self) -> list[list[int]]:
        return [part.tolist() for part in self.indices.split(self.request.batch_size)]

    def _batches(self, chunks: Sequence[list[int]]) -> Iterator[Batch]:
        return read_batches(self.source, chunks, self.preprocess, skip_bad=self.request.skip_bad)

    def pictures(self, name: str) -> None:
        """One file per image and severity; a batch whose files are all there is not read again."""
        mine = self._chunks()[self.processes.rank :: self.processes.count]
        todo = [
            chunk for chunk in mine if not all(self._path(name, level, i).exists() for level, i in self._each(chunk))
        ]
        shown = self.show_progress and self.processes.is_main
        with progress(name, sum(map(len, mine)), shown, self.expected.get(name)) as meter:
            if len(todo) < len(mine):
                meter.advance(sum(map(len, mine)) - sum(map(len, todo)), RESUMED)
            for chunk, batch in zip(todo, self._batches(todo), strict=True):
                for level, z in versions(batch, name, self.request.severities, self.request.seed):
                    for index, pixels in zip(batch.indices.tolist(), in_bytes(z), strict=True):
                        write_atomically(self._path(name, level, index), encoded(pixels, self.request.format))
                meter.advance(len(chunk))

    def _each(self, chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((level, index) for level in self.request.severities for index in chunk)

    def _path(self, name: str, level: int, index: int) -> Path:
        """corruption/severity/class/picture; a file keeps its name, so that readers of benchmarks find its class."""
        if isinstance(self.source, ImageFiles):
            place = _own_name(self.source, index, self.request.format)
        else:
            folder = _class_folder(self.source, int(self.source.labels()[index]))
            place = PurePosixPath(folder, f"{index:08d}{_ENDINGS[self.request.format]}")
        return self.folder / name / str(level) / place

    def unwritten(self, names: Sequence[str]) -> list[int]:
        """Images that could not be read by any process, now or before the run was resumed."""
        if not self.request.skip_bad:
            return []
        lost = [
            index
            for index in self.indices.tolist()
            if not all(self._path(name, level, i).exists() for name in names for level, i in self._each([index]))
        ]
        if len(lost) == len(self.indices):
            raise UserError("no sample could be read, so the copy is empty; check the files of the data")
        return lost

    def arrays(self, name: str) -> None:
        """One .npy per corruption with all severities, the mildest first; it appears when it is complete."""
        path = self.folder / f"{name}.npy"
        if path.exists():
            return
        part, count = path.with_suffix(".part"), len(self.indices)
        shape = (len(SEVERITIES) * count, *self.preprocess.shape, 3)
        try:
            with (
                disk_errors_reported(path),
                part.open("wb") as file,
                progress(name, count, self.show_progress, self.expected.get(name)) as meter,
            ):
                start = _header(file, shape)
                row_bytes, done = int(np.prod(shape[1:])), 0
                for batch in self._batches(self._chunks()):
                    for level, z in versions(batch, name, SEVERITIES, self.request.seed):
                        file.seek(start + ((level - 1) * count + done) * row_bytes)
                        file.write(in_bytes(z).tobytes())
                    done += len(batch.y)
                    meter.advance(len(batch.y))
                file.flush()
                os.fsync(file.fileno())
                part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)  # on a full disk it would block everything else
            raise


def _own_name(source: ImageFiles, index: int, kind: str) -> PurePosixPath:
    return PurePosixPath(source.files[index]).with_suffix(_ENDINGS[kind])


def _refuse_shared_files(source: Source, indices: Tensor, kind: str) -> None:
    """Refuse pictures whose names differ only in their suffix: they would overwrite each other."""
    if kind == "npy" or not isinstance(source, ImageFiles):
        return
    taken: dict[PurePosixPath, str] = {}
    for index in indices.tolist():
        file, place = source.files[index], _own_name(source, index, kind)
        if place in taken:
            raise UserError(f"{taken[place]} and {file} would both be written to {place}; rename one of them")
        taken[place] = file


def _results(
    spec: str, source: Source, request: CorruptedCopyRequest, n: int, lost: Sequence[str], about: dict[str, Any]
) -> dict[str, Any]:
    return {
        **result_header(request.seed),
        "data": {
            "spec": spec,
            "n": n,
            **samples_left_out(source, lost),
        },
        "copy": {
            **about,
            "severities": list(request.severities),
            "format": f"jpeg, quality {_QUALITY}" if request.format == "jpeg" else request.format,
        },
    }


def samples_left_out(source: Source, lost: Sequence[str]) -> dict[str, Any]:
    """Fields of results about what the copy does not have."""
    return {
        "classes": len(source.classes),
        "left_out": len(lost),
        "left_out_names": list(lost[:_NAMED]),
        "not_opened": list(skipped(source)),
    }


def _class_folder(source: Source, label: int) -> str:
    """Numbered, so that `folder:` reads the classes in their order."""
    digits = len(str(len(source.classes) - 1))
    name = re.sub(r"[^\w.-]+", "_", source.classes[label]).strip("._")
    return f"{label:0{digits}d}-{name}" if name else f"{label:0{digits}d}"


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    """A picture as the bytes of a file, png or jpeg."""
    buffer = io.BytesIO()
    save = partial(Image.fromarray(pixels).save, buffer)
    save(format="PNG") if kind == "png" else save(format="JPEG", quality=_QUALITY, optimize=True)
    return buffer.getvalue()


def _header(file: IO[bytes], shape: tuple[int, ...]) -> int:
    """Write the header of a .npy file of bytes; returns the offset of its rows."""
    layout = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, layout)
    return file.tell()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
