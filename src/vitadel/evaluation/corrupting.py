"""A corrupted copy of a data set on disk: pictures in the layout of ImageNet-C, or arrays in that of CIFAR-C."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitadel.corruptions import COMMON, SEVERITIES, corrupt
from vitadel.data import balanced_subset, batches, check_labels
from vitadel.data.batches import Batch
from vitadel.data.folders import ImageFiles
from vitadel.data.preprocess import Preprocess
from vitadel.errors import Interrupted, Mistake, nearest_names
from vitadel.evaluation.corruption_order import check_corruptions, check_severities
from vitadel.evaluation.results import SCHEMA
from vitadel.runtime.draws import Draws
from vitadel.runtime.processes import Processes
from vitadel.runtime.progress import FOUND_AGAIN, progress
from vitadel.runtime.rundir import RunFolder, open_run, write_atomically, write_json
from vitadel.types import Source
from vitadel.version import __version__

__all__ = ["FORMATS", "CopyOrder", "usable_corruptions", "versions", "write_copy"]

FORMATS = ("png", "jpeg", "npy")
_QUALITY = 85  # of ImageNet-C's own files
_SMALL = 96  # pixels; images up to this size are taken as they are
_IMAGENET_SIZE, _IMAGENET_RESIZE = 224, 256


@dataclass(frozen=True)
class CopyOrder:
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
        if self.format not in FORMATS:
            raise Mistake(
                f"unknown format {self.format!r}{nearest_names(self.format, FORMATS)}; allowed: {', '.join(FORMATS)}"
            )
        if self.batch_size < 1:
            raise Mistake(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.format == "npy" and (self.severities != SEVERITIES or self.skip_bad):
            raise Mistake(
                "the arrays of CIFAR-C hold every image at all five severities: drop --severities, --skip-bad"
            )


def versions(batch: Batch, name: str, severities: Sequence[int], seed: int) -> Iterator[tuple[int, Tensor]]:
    """A batch at each severity of a corruption, from the streams of its samples: the same in every run."""
    draws = Draws.of_samples(seed, batch.indices, batch.x.device)
    for level in severities:
        yield level, corrupt(batch.x, name, level, draws)


def usable_corruptions(asked: Sequence[str] | None, size: tuple[int, int]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The asked-for ones; by default those of the 15 common ones that can be had here, and why not the others."""
    probe, reasons = Batch(torch.zeros(1, dtype=torch.int64), torch.full((1, 3, *size), 0.5), torch.zeros(1)), {}
    for name in COMMON if asked is None else asked:
        try:
            next(versions(probe, name, SEVERITIES, 0))
        except Mistake as mistake:
            if asked is not None:
                raise
            reasons[name] = str(mistake)
    return tuple(name for name in (COMMON if asked is None else asked) if name not in reasons), reasons


def write_copy(
    source: Source,
    spec: str,
    order: CopyOrder,
    processes: Processes,
    *,
    out: Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> tuple[dict[str, Any], RunFolder]:
    """Write the copy into a run folder; what a killed run has finished is found again with `resume`."""
    labels = source.labels()
    bad = {sample.index for sample in check_labels(source, len(source.classes), skip_bad=order.skip_bad)}
    rows = torch.tensor([row for row in range(len(labels)) if row not in bad])
    indices = balanced_subset(labels[rows], order.limit, order.seed, rows)
    preprocess = _preprocess(source, order.size)
    names, left_out = usable_corruptions(order.corruptions, preprocess.shape)
    chosen = hashlib.sha256(torch.stack([indices, labels[indices]]).numpy().tobytes()).hexdigest()[:16]
    settings = {"data": spec, "data_fingerprint": chosen, **dataclasses.asdict(order), "corruptions": names}
    run = processes.on_main(
        lambda: open_run("corrupt", spec, settings, out=out, resume=resume, argv=list(argv or sys.argv))
    )
    copy = _Copy(source, order, indices, preprocess, run.path, processes, shown)
    try:
        for number, name in enumerate(names):
            if order.format != "npy":
                copy.pictures(name)
            elif number % processes.count == processes.rank:  # a file has one writer
                copy.arrays(name)
        processes.wait()
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    results = _results(spec, source, order, indices, preprocess, names, left_out)
    if processes.is_main:
        if order.format == "npy":
            write_atomically(run.path / "labels.npy", _npy(labels[indices].repeat(len(SEVERITIES)).numpy()))
        write_json(run.path / "results.json", results)
    return results, run


@dataclass(frozen=True, eq=False)
class _Copy:
    source: Source
    order: CopyOrder
    indices: Tensor
    preprocess: Preprocess
    folder: Path
    processes: Processes
    shown: bool

    def _chunks(self) -> list[list[int]]:
        return [part.tolist() for part in self.indices.split(self.order.batch_size)]

    def _batches(self, chunks: Sequence[list[int]]) -> Iterator[Batch]:
        return batches(self.source, chunks, self.preprocess, skip_bad=self.order.skip_bad)

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
                for level, z in versions(batch, name, self.order.severities, self.order.seed):
                    for index, pixels in zip(batch.indices.tolist(), _in_bytes(z), strict=True):
                        write_atomically(self._path(name, level, index), _encoded(pixels, self.order.format))
                meter.advance(len(chunk))

    def _each(self, chunk: Sequence[int]) -> Iterator[tuple[int, int]]:
        return ((level, index) for level in self.order.severities for index in chunk)

    def _path(self, name: str, level: int, index: int) -> Path:
        """corruption/severity/class/picture; a file keeps its own name, so that benchmarks' readers find its class."""
        ending = {"png": ".png", "jpeg": ".JPEG"}[self.order.format]
        if isinstance(self.source, ImageFiles):
            place = PurePosixPath(self.source.files[index]).with_suffix(ending)
        else:
            place = PurePosixPath(_class_folder(self.source, int(self.source.labels()[index])), f"{index:08d}{ending}")
        return self.folder / name / str(level) / place

    def arrays(self, name: str) -> None:
        """One .npy per corruption with all severities, the mildest first; it appears when it is complete."""
        path = self.folder / f"{name}.npy"
        if path.exists():
            return
        part, count = path.with_suffix(".part"), len(self.indices)
        shape = (len(SEVERITIES) * count, *self.preprocess.shape, 3)
        with part.open("wb") as file, progress(name, count, self.shown) as meter:
            start = _header(file, shape)
            row_bytes, done = int(np.prod(shape[1:])), 0
            for batch in self._batches(self._chunks()):
                for level, z in versions(batch, name, SEVERITIES, self.order.seed):
                    file.seek(start + ((level - 1) * count + done) * row_bytes)
                    file.write(_in_bytes(z).tobytes())
                done += len(batch.y)
                meter.advance(len(batch.y))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def _preprocess(source: Source, size: int | None) -> Preprocess:
    if size is None:
        images = (source.read([index])[0] for index in range(len(source)))
        first = next((image for image in images if not isinstance(image, Exception)), None)
        if first is None:
            raise Mistake("no image of the data can be read")
        if max(first.size) <= _SMALL:
            return Preprocess((first.height, first.width), 1.0, "bilinear")
    return Preprocess(size or _IMAGENET_SIZE, _IMAGENET_SIZE / _IMAGENET_RESIZE, "bilinear")


def _results(
    spec: str,
    source: Source,
    order: CopyOrder,
    indices: Tensor,
    preprocess: Preprocess,
    names: Sequence[str],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "version": __version__,
        "complete": True,
        "seed": order.seed,
        "data": {"spec": spec, "n": len(indices), "classes": len(source.classes)},
        "copy": {
            "corruptions": list(names),
            "severities": list(order.severities),
            "format": f"jpeg, quality {_QUALITY}" if order.format == "jpeg" else order.format,
            "size": list(preprocess.shape),
            "left_out": dict(left_out),
        },
    }


def _class_folder(source: Source, label: int) -> str:
    """Numbered, so that `folder:` reads the classes in their order."""
    digits = len(str(len(source.classes) - 1))
    name = re.sub(r"[^\w.-]+", "_", source.classes[label]).strip("._")
    return f"{label:0{digits}d}-{name}" if name else f"{label:0{digits}d}"


def _in_bytes(z: Tensor) -> np.ndarray:
    """Corrupted pixels are whole grey levels already; (n, height, width, 3)."""
    return np.ascontiguousarray((z * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy())


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
