"""Image files with labels: `folder:DIR` with one sub-folder per class, and the base of the ImageNet family."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL.Image import Image
from torch import Tensor

from vitadel.data.batches import skip_advice
from vitadel.data.images import IMAGE_EXTENSIONS, LabeledImages, decode
from vitadel.data.spec import SPLIT_NAMES, DataRequest, pick_split
from vitadel.errors import UserError
from vitadel.runtime.safe_reading import check_name, check_regular_file

_ENDINGS = tuple(sorted("." + extension for extension in IMAGE_EXTENSIONS))


@dataclass(frozen=True, eq=False)
class ImageFiles(LabeledImages):
    """Image files; only their names are held in memory.

    `parts` names ranges of consecutive samples, such as a corruption at one severity; `among` are the classes that a
    benchmark lets the model choose from, if these are not all.
    """

    root: Path
    classes: tuple[str, ...] = field(repr=False)
    files: tuple[str, ...] = field(repr=False)  # below root, with forward slashes
    targets: Tensor = field(repr=False)
    skipped: tuple[str, ...] = ()
    parts: Mapping[str, range] = field(default_factory=dict, repr=False)
    among: tuple[int, ...] | None = field(default=None, repr=False)

    def image(self, index: int) -> Image:
        path = os.path.join(self.root, self.files[index])  # paths of pathlib take as long as opening the file
        check_regular_file(path, "image")
        with open(path, "rb") as file:
            return decode(file.read())

    def name(self, index: int) -> str:
        return self.files[index]


def open_folder(request: DataRequest) -> ImageFiles:
    """Open one class per sub-folder, numbered by code point; samples are sorted by class, then by path."""
    request.read_settings()
    root = split_folder(request, request.path("a folder with one sub-folder per class"))
    names = class_folders(root)
    if not names:
        raise UserError(f"'{root}' has no sub-folders; expected one per class, each with the images of that class")
    files: list[str] = []
    counts = []
    for name in names:
        found = sorted(f"{name}/{path}" for path in files_below(root / name))
        files += found
        counts.append(len(found))
    empty = [name for name, members in zip(names, counts, strict=True) if not members]
    if not files:
        raise UserError(f"'{root}' has {len(names)} sub-folders, but no image in them ({', '.join(_ENDINGS)})")
    if empty and not request.skip_bad:
        raise UserError(
            f"class '{empty[0]}' is empty: no image ({', '.join(_ENDINGS)}) in '{root / empty[0]}'"
            f"{f' (and {len(empty) - 1} more)' if len(empty) > 1 else ''}. Remove the folder if it is not a class"
            f"{skip_advice(request.skip_bad, ', or keep it without samples')}"
        )
    targets = torch.arange(len(names)).repeat_interleave(torch.tensor(counts))
    return ImageFiles(root, tuple(names), tuple(files), targets, tuple(f"class '{name}' is empty" for name in empty))


def split_folder(request: DataRequest, path: Path, order: Sequence[str] = ()) -> Path:
    """The sub-folder of the split if `path` has splits, else `path` itself; splits in `order` are preferred."""
    if not path.is_dir():
        raise UserError(f"'{path}' is a file; {request.kind} expects a folder")
    splits = [name for name in SPLIT_NAMES if (path / name).is_dir() and class_folders(path / name)]
    if request.split is None:
        to_test_on = set(splits) - {"train", "trainval"}
        if not splits or (not to_test_on and len(class_folders(path)) > len(splits)):
            return path  # no splits, or a class called 'train'
        preferred = next((name for name in order if name in splits), None)
        return path / (preferred or pick_split(splits, None, f"'{path}'"))
    if not splits:
        raise UserError(
            f"'{path}' has no sub-folder '{request.split}' with classes in it, so @{request.split} picks nothing; "
            f"make one, or name the folder of the classes itself"
        )
    return path / pick_split(splits, request.split, f"'{path}'")


def class_folders(root: Path) -> list[str]:
    """Names of the sub-folders that are not hidden, by code point."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError as fault:
        raise UserError(f"the folder '{root}' cannot be read: {fault}") from fault
    for name in names:
        check_name(name, "class folder")
    return names


def files_below(root: Path, endings: Sequence[str] = _ENDINGS) -> Iterator[str]:
    """Paths below `root` with forward slashes, in no order, without hidden files."""
    seen: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(root, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:  # a link back to a folder above
            below.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        place = Path(folder).relative_to(root)
        for name in names:
            if not name.startswith(".") and name.lower().endswith(tuple(endings)):
                check_name(name, "image file")
                yield (place / name).as_posix()
