"""Whether two data specs, however they are written, mean the same images: test images must not be trained on."""

from __future__ import annotations

import os
from pathlib import Path

from vitadel.data.sources.generated import open_shapes
from vitadel.data.spec import Request
from vitadel.data.splits import SPLIT_NAMES, pick_split
from vitadel.errors import UserError

__all__ = ["identity", "same_images"]

_USUAL = ("test", "val", "train", "trainval")
_IN_FOLDERS = ("folder", "imagenet")  # a split of these is a sub-folder


def same_images(one: Request, other: Request) -> bool:
    """By kind, path and split; a spec without a split means the one to test on. Nothing is read.

    Settings such as columns or a list of files lead to the same images, or to some of them. Only two arrays of one
    file, or two configurations, are different ones.
    """
    if one.kind != "shapes":
        first, second = (request.settings.get("images") for request in (one, other))
        if None not in (first, second) and first != second:
            return False
        if one.settings.get("config") != other.settings.get("config"):
            return False
    return identity(one) == identity(other)


def identity(request: Request) -> object:
    """What it is known by, but for settings; a `UserError` if those of generated images are wrong."""
    if request.kind == "shapes":
        shapes = open_shapes(request)  # generated: opening costs nothing and knows the defaults
        return request.kind, shapes.seed, shapes.split  # of which settings are variants
    if request.kind in _IN_FOLDERS:
        return request.kind, _folder(request)
    path = os.path.realpath(Path(request.argument).expanduser()) if request.argument else ""
    return request.kind, path, _split(request, _USUAL)


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
    except UserError:  # told when it is opened; here it is only a name
        return request.split or ""
