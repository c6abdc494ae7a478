"""`shards:PATTERN`: tar files in the webdataset layout, with random access to every sample.

A tar file has no table of contents, so its headers are scanned once; then a sample is a seek and a read.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from vitadel.data.batches import skip_advice
from vitadel.data.files import matching_files
from vitadel.data.images import IMAGE_EXTENSIONS, LabeledImages, decode
from vitadel.data.labels import number_labels, read_class_names
from vitadel.data.spec import DataRequest
from vitadel.errors import UserError

_JSON_KEYS = ("label", "cls", "class")
_CLASS_FILES = ("classes.txt", "classnames.txt", "class_names.txt")


@dataclass(frozen=True, eq=False)
class ShardImages(LabeledImages):
    """Samples in the order of the shards and of the keys within them."""

    shards: tuple[Path, ...]
    names: tuple[str, ...] = field(repr=False)  # of the image member, or the key where there is none
    places: NDArray[np.int64] = field(repr=False)  # (shard, offset, size) per sample; size -1 without an image
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    skipped: tuple[str, ...] = ()

    def name(self, index: int) -> str:
        return f"{self.shards[int(self.places[index, 0])].name}/{self.names[index]}"

    def image(self, index: int) -> Image:
        shard, offset, size = self.places[index].tolist()
        if size < 0:
            raise ValueError(f"the sample has no image ({', '.join(sorted(IMAGE_EXTENSIONS))})")
        with self.shards[shard].open("rb") as file:
            file.seek(offset)
            return decode(file.read(size))


def open_shards(request: DataRequest) -> ShardImages:
    """Labels come from `.cls` or `label` in `.json`, class names from `(classes=FILE)` or classes.txt in the folder."""
    chosen = request.read_settings(classes=lambda text: Path(os.path.expanduser(text)))
    shards = matching_files(request, ".tar")
    beside = (shards[0].parent / name for name in _CLASS_FILES)
    class_file = chosen.get("classes") or next((path for path in beside if path.is_file()), None)
    samples: list[_Sample] = []
    skipped: list[str] = []
    for number, path in enumerate(shards):
        before = len(samples)
        try:
            samples.extend(_samples(path, number))
        except (OSError, tarfile.TarError) as fault:
            message = f"'{path}' cannot be read beyond its first {len(samples) - before} samples: {fault}"
            if not request.skip_bad:
                raise UserError(
                    f"{message}; expected an uncompressed tar file (unpack .tar.gz first: samples are read by their "
                    f"place in the file). Replace it{skip_advice(request.skip_bad, ', or skip the rest of it')}"
                ) from fault
            skipped.append(message)
    if not samples:
        raise UserError(
            f"'{request.argument}' holds no samples; expected pairs such as 0001.jpg and 0001.cls in tar files"
        )
    labels, classes = number_labels(
        [sample.label for sample in samples], read_class_names(class_file) if class_file else None
    )
    if int(labels.max()) < 0:
        raise UserError(
            f"'{shards[0]}': no sample has a label; expected a member such as {samples[0].key}.cls with a number, or "
            f'{samples[0].key}.json with {{"label": ...}}'
        )
    return ShardImages(
        shards=tuple(shards),
        names=tuple(sample.image for sample in samples),
        places=np.array([(sample.shard, sample.offset, sample.size) for sample in samples], dtype=np.int64),
        targets=labels,
        classes=classes,
        skipped=tuple(skipped),
    )


@dataclass
class _Sample:
    """A sample while its members are being read."""

    shard: int
    key: str
    image: str
    offset: int = -1
    size: int = -1
    label: int | str | None = None

    def add(self, ending: str, member: tarfile.TarInfo, file: IO[bytes]) -> None:
        if self.size < 0 and ending.rpartition(".")[2] in IMAGE_EXTENSIONS:
            self.image, self.offset, self.size = member.name, member.offset_data, member.size
        elif self.label is None and ending in ("cls", "json"):
            file.seek(member.offset_data)
            self.label = _label(ending, file.read(member.size))


def _samples(path: Path, shard: int) -> Iterator[_Sample]:
    """Group consecutive members by key: the name up to the first dot after the last slash."""
    current: _Sample | None = None
    with tarfile.open(path, mode="r:") as archive, path.open("rb") as file:
        length = path.stat().st_size
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # the list would otherwise grow with the shard
            folder, _, base = member.name.rpartition("/")
            stem, _, ending = base.partition(".")
            if not member.isfile() or not stem:
                continue
            if member.offset_data + member.size > length:
                raise tarfile.ReadError(f"the file ends within {member.name}")
            key = f"{folder}/{stem}" if folder else stem
            if current is None or current.key != key:
                if current is not None:
                    yield current
                current = _Sample(shard, key, image=key)
            current.add(ending.lower(), member, file)
    if current is not None:
        yield current


def _label(ending: str, content: bytes) -> int | str | None:
    try:
        text = content.decode("utf-8").strip()
        if ending == "cls":
            return text or None
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = next((record[key] for key in _JSON_KEYS if key in record), None) if isinstance(record, dict) else record
    return found if isinstance(found, (int, str)) and not isinstance(found, bool) else None
