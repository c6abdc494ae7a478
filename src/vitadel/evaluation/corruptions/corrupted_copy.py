"""A corrupted copy of a data set on disk: pictures in the layout of ImageNet-C, or arrays in that of CIFAR-C."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitadel.corruptions import COMMON, SEVERITIES, corrupt
from vitadel.data import balanced_subset, check_labels, read_batches
from vitadel.data.batches import Batch
from vitadel.data.preprocess import Preprocess
from vitadel.data.sources.folders import ImageFiles
from vitadel.data.validation import skipped
from vitadel.errors import Interrupted, UserError, nearest_names
from vitadel.evaluation.corruptions.request import check_corruptions, check_severities
from vitadel.evaluation.corruptions.sizes import benchmark_preprocess, in_bytes
from vitadel.evaluation.engine.verdicts import heading
from vitadel.runtime.distributed import Processes
from vitadel.runtime.progress import FOUND_AGAIN, progress
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder, disk_errors_reported, open_run, write_atomically, write_json
from vitadel.types import Source

__all__ = ["FORMATS", "CorruptedCopyRequest", "usable_corruptions", "versions", "write_copy"]

FORMATS = ("png", "jpeg", "npy")
_ENDINGS = {"png": ".png", "jpeg": ".JPEG"}
_QUALITY = 85  # of ImageNet-C's own files
_NAMED = 20  # of the images that are left out


@dataclass(frozen=True)
class CorruptedCopyRequest:
    """What to write. `format` png keeps every pixel, jpeg is what ImageNet-C's files went through, npy is CIFAR-C's.

    `size` None takes images of up to 96 pixels as they are, and larger ones as ImageNet-C does: resized to 256 and
    cropped to 224.
    """

    corruptions: tuple[str, ...] | None = None
    severities: tuple[int, ...] = SEVERITIES
    format: str = "png"
    size: int | None = None
    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    skip_bad: bool = False

    def __post_init__(self) -> None:
        check_corruptions(self.corruptions or ())
        check_severities(self.severities)
        if self.corruptions == ():
            raise UserError("no corruption is asked for, so there is nothing to write; give some with --corruptions")
        if self.format not in FORMATS:
            raise UserError(
                f"unknown format {self.format!r}{nearest_names(self.format, FORMATS)}; allowed: {', '.join(FORMATS)}"
            )
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.format == "npy" and (self.severities != SEVERITIES or self.skip_bad):
            raise UserError(
                "the arrays of CIFAR-C hold every image at all five severities: drop --severities, --skip-bad"
            )


def versions(batch: Batch, name: str, severities: Sequence[int], seed: int) -> Iterator[tuple[int, Tensor]]:
    """A batch at each severity of a corruption, from the streams of its samples: the same in every run."""
    rng = SampleRNG.of_samples(seed, batch.indices, batch.x.device)
    for level in severities:
        yield level, corrupt(batch.x, name, level, rng)


def usable_corruptions(asked: Sequence[str] | None, size: tuple[int, int]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The asked-for ones; by default those of the 15 common ones that can be had here, and why not the others."""
    probe, reasons = Batch(torch.zeros(1, dtype=torch.int64), torch.full((1, 3, *size), 0.5), torch.zeros(1)), {}
    for name in COMMON if asked is None else asked:
        try:
            next(versions(probe, name, SEVERITIES, 0))
        except UserError as mistake:
            if asked is not None:
                raise
            reasons[name] = str(mistake)
    return tuple(name for name in (COMMON if asked is None else asked) if name not in reasons), reasons


def write_copy(
    source: Source,
    spec: str,
    request: CorruptedCopyRequest,
    processes: Processes,
    *,
    out: Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> tuple[dict[str, Any], RunFolder]:
    """Write the copy into a run folder; what a killed run has finished is found again with `resume`."""
    labels = source.labels()
    mislabelled = check_labels(source, len(source.classes), skip_bad=request.skip_bad)
    bad = {sample.index for sample in mislabelled}
    rows = torch.tensor([row for row in range(len(labels)) if row not in bad], dtype=torch.int64)
    indices = balanced_subset(labels[rows], request.limit, request.seed, rows)
    _refuse_shared_files(source, indices, request.format)
    preprocess = benchmark_preprocess(source, request.size)
    names, reasons = usable_corruptions(request.corruptions, preprocess.shape)
    chosen = hashlib.sha256(torch.stack([indices, labels[indices]]).numpy().tobytes()).hexdigest()[:16]
    settings = {"data": spec, "data_fingerprint": chosen, **dataclasses.asdict(request), "corruptions": names}
    run = processes.on_main(
        lambda: open_run("corrupt", spec, settings, out=out, resume=resume, argv=list(argv or sys.argv))
    )
    copy = _Copy(source, request, indices, preprocess, run.path, processes, shown)
    try:
        for number, name in enumerate(names):
            if request.format != "npy":
                copy.pictures(name)
            elif number % processes.count == processes.rank:  # a file has one writer
                copy.arrays(name)
        processes.wait()
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    unread = copy.unwritten(names)
    told = {"corruptions": list(names), "size": list(preprocess.shape), "left_out": reasons}
    lost = [*(sample.name for sample in mislabelled), *map(source.name, unread)]
    results = _results(spec, source, request, len(indices) - len(unread), lost, told)
    if processes.is_main:
        if request.format == "npy":
            write_atomically(run.path / "labels.npy", _npy(labels[indices].repeat(len(SEVERITIES)).numpy()))
        write_json(run.path / "results.json", results)
    return results, run


@dataclass(frozen=True, eq=False)
class _Copy:
    source: Source
    request: CorruptedCopyRequest
    indices: Tensor
    preprocess: Preprocess
    folder: Path
    processes: Processes
    shown: bool

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
        with progress(name, sum(map(len, mine)), self.shown and self.processes.is_main) as meter:
            if len(todo) < len(mine):
                meter.advance(sum(map(len, mine)) - sum(map(len, todo)), FOUND_AGAIN)
            for chunk, batch in zip(todo, self._batches(todo), strict=True):
                for level, z in versions(batch, name, self.request.severities, self.request.seed):
                    for index, pixels in zip(batch.indices.tolist(), in_bytes(z), strict=True):
                        write_atomically(self._path(name, level, index), _encoded(pixels, self.request.format))
                meter.advance(len(chunk))

    def _each(self, chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((level, index) for level in self.request.severities for index in chunk)

    def _path(self, name: str, level: int, index: int) -> Path:
        """corruption/severity/class/picture; a file keeps its own name, so that benchmarks' readers find its class."""
        if isinstance(self.source, ImageFiles):
            place = _own_name(self.source, index, self.request.format)
        else:
            folder = _class_folder(self.source, int(self.source.labels()[index]))
            place = PurePosixPath(folder, f"{index:08d}{_ENDINGS[self.request.format]}")
        return self.folder / name / str(level) / place

    def unwritten(self, names: Sequence[str]) -> list[int]:
        """Images that could not be read, by whichever process, now or before the run was resumed."""
        if not self.request.skip_bad:
            return []
        lost = [
            index
            for index in self.indices.tolist()
            if not all(self._path(name, level, i).exists() for name in names for level, i in self._each([index]))
        ]
        if len(lost) == len(self.indices):
            raise UserError("none of the chosen images can be read, so the copy is empty; check the files of the data")
        return lost

    def arrays(self, name: str) -> None:
        """One .npy per corruption with all severities, the mildest first; it appears when it is complete."""
        path = self.folder / f"{name}.npy"
        if path.exists():
            return
        part, count = path.with_suffix(".part"), len(self.indices)
        shape = (len(SEVERITIES) * count, *self.preprocess.shape, 3)
        try:
            with disk_errors_reported(path), part.open("wb") as file, progress(name, count, self.shown) as meter:
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
            part.unlink(missing_ok=True)  # on a full disk it would be in the way of everything else
            raise


def _own_name(source: ImageFiles, index: int, kind: str) -> PurePosixPath:
    return PurePosixPath(source.files[index]).with_suffix(_ENDINGS[kind])


def _refuse_shared_files(source: Source, indices: Tensor, kind: str) -> None:
    """Pictures that differ by their endings alone would be written over each other."""
    if kind == "npy" or not isinstance(source, ImageFiles):
        return
    taken: dict[PurePosixPath, str] = {}
    for index in indices.tolist():
        file, place = source.files[index], _own_name(source, index, kind)
        if place in taken:
            raise UserError(f"{taken[place]} and {file} would both be written to {place}; rename one of them")
        taken[place] = file


def _results(
    spec: str, source: Source, request: CorruptedCopyRequest, n: int, lost: Sequence[str], told: dict[str, Any]
) -> dict[str, Any]:
    return {
        **heading(request.seed),
        "data": {
            "spec": spec,
            "n": n,
            "classes": len(source.classes),
            "left_out": len(lost),
            "left_out_names": list(lost[:_NAMED]),
            "not_opened": list(skipped(source)),
        },
        "copy": {
            **told,
            "severities": list(request.severities),
            "format": f"jpeg, quality {_QUALITY}" if request.format == "jpeg" else request.format,
        },
    }


def _class_folder(source: Source, label: int) -> str:
    """Numbered, so that `folder:` reads the classes in their order."""
    digits = len(str(len(source.classes) - 1))
    name = re.sub(r"[^\w.-]+", "_", source.classes[label]).strip("._")
    return f"{label:0{digits}d}-{name}" if name else f"{label:0{digits}d}"


def _encoded(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    save = partial(Image.fromarray(pixels).save, buffer)
    save(format="PNG") if kind == "png" else save(format="JPEG", quality=_QUALITY, optimize=True)
    return buffer.getvalue()


def _header(file: IO[bytes], shape: tuple[int, ...]) -> int:
    """Begin a .npy file of bytes; returns where its rows start."""
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.tell()


def _npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()
