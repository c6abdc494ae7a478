"""Whether two data specs, however they are written, mean the same images: test images must not be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from vitadel.amounts import read_amount
from vitadel.data.generated import open_shapes
from vitadel.data.spec import Request
from vitadel.data.splits import SPLIT_NAMES, pick_split
from vitadel.errors import Mistake

__all__ = ["same_images"]

_USUAL = ("test", "val", "train", "trainval")
_IN_FOLDERS = ("folder", "imagenet")  # a split of these is a sub-folder
_COLUMNS = ("image", "label", "labels", "mask", "classes")  # other ones of the same file are of the same images


def same_images(one: Request, other: Request) -> bool:
    """By kind, path, settings and split; a spec without a split means the one to test on. Nothing is read."""
    return _identity(one) == _identity(other)


def _identity(request: Request) -> object:
    if request.kind == "shapes":
        return open_shapes(request)  # generated: opening costs nothing and knows the defaults
    settings = {name: _number_or_text(text) for name, text in request.settings.items() if name not in _COLUMNS}
    if request.kind in _IN_FOLDERS:
        return request.kind, _folder(request), settings
    path = os.path.realpath(Path(request.argument).expanduser()) if request.argument else ""
    return request.kind, path, settings, _split(request, _USUAL)


def _folder(request: Request) -> str:
    """Where the images are; a folder that is not there is taken to have the usual sub-folders."""
    path = Path(request.argument).expanduser()
    there = [name for name in SPLIT_NAMES if (path / name).is_dir()]
    if path.is_dir() and not there:
        return os.path.realpath(path)
    return os.path.realpath(path / _split(request, there or _USUAL))


def _split(request: Request, there: list[str] | tuple[str, ...]) -> str:
    if request.kind == "imagenet" and request.split is None:  # its own test split has no labels
        there = [name for name in there if name != "test"] or there
    try:
        return pick_split(there, request.split, request.spec)
    except Mistake:  # told when it is opened; here it is only a name
        return request.split or ""


def _number_or_text(text: str) -> float | str:
    try:
        return read_amount(text)
    except Mistake:
        return text
