"""Whether two data specs mean the same images, so that test images are not trained on."""

from __future__ import annotations

import os
from pathlib import Path

from vitadel.data.sources.shapes import open_shapes
from vitadel.data.spec import SPLIT_NAMES, DataRequest, pick_split
from vitadel.errors import UserError

__all__ = ["identity", "same_images"]

_USUAL = ("test", "val", "train", "trainval")
_IN_FOLDERS = ("folder", "imagenet")  # a split of these is a sub-folder


def same_images(one: DataRequest, other: DataRequest) -> bool:
    """Compare kind, path and split without reading data; a spec without a split means the test split.

    Settings such as columns or a list of files select the same images, or some of them. Only different arrays of one
    file and different configurations are different images.
    """
    if one.kind != "shapes":
        first, second = (request.settings.get("images") for request in (one, other))
        if None not in (first, second) and first != second:
            return False
        if one.settings.get("config") != other.settings.get("config"):
            return False
    return identity(one) == identity(other)


def identity(request: DataRequest) -> object:
    """What identifies the images, apart from settings; a `UserError` if settings of generated images are wrong."""
    if request.kind == "shapes":
        shapes = open_shapes(request)  # generated: opening costs nothing and fills in the defaults
        return request.kind, shapes.seed, shapes.split  # settings make variants of the same images
    if request.kind in _IN_FOLDERS:
        return request.kind, _folder(request)
    path = os.path.realpath(Path(request.argument).expanduser()) if request.argument else ""
    return request.kind, path, _split(request, _USUAL)


def _folder(request: DataRequest) -> str:
    """The folder of the images; a folder that does not exist is assumed to have the usual sub-folders."""
    path = Path(request.argument).expanduser()
    found = [name for name in SPLIT_NAMES if (path / name).is_dir()]
    if path.is_dir() and not found:
        return os.path.realpath(path)
    return os.path.realpath(path / _split(request, found or _USUAL))


def _split(request: DataRequest, available: list[str] | tuple[str, ...]) -> str:
    if request.kind == "imagenet" and request.split is None:  # its own test split has no labels
        available = [name for name in available if name != "test"] or available
    try:
        return pick_split(available, request.split, request.spec)
    except UserError:  # reported when the data is opened
        return request.split or ""
