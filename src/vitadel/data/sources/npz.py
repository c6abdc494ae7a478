"""`npz:FILE`: NumPy archives of images and labels, with or without splits."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL.Image import Image
from torch import Tensor

from vitadel.data.images import LabeledImages
from vitadel.data.labels import names_of_numbers
from vitadel.data.sources.arrays import ArrayRows, image_rows, label_tensor, rows_of_npz, small_array
from vitadel.data.spec import SPLIT_NAMES, DataRequest, pick_split
from vitadel.errors import UserError, nearest_names

_IMAGES = ("images", "image", "x", "data", "imgs")
_LABELS = ("labels", "label", "y", "targets", "target")
_CLASSES = ("classes", "class_names", "names")


@dataclass(frozen=True, eq=False)
class ArrayImages(LabeledImages):
    """Pixels in an array on disk; float pixels in [0, 1] are rounded to 8 bits."""

    path: Path
    pixels: ArrayRows = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        return image_rows(self.pixels, indices)

    def name(self, index: int) -> str:
        return f"{self.path.name} row {index}"


def open_npz(request: DataRequest) -> ArrayImages:
    """Arrays `images`/`x`/`data` and `labels`/`y`; with splits `train_images`, `x_test` and so on."""
    chosen = request.read_settings(images=str, labels=str)
    path = request.path("a NumPy archive (.npz)")
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except (OSError, zipfile.BadZipFile) as fault:
        raise UserError(f"'{path}' cannot be read: {fault}; expected a NumPy archive (.npz)") from fault
    split = _split(members, request, path)
    pixels = rows_of_npz(path, _member("images", _IMAGES, members, split, chosen.get("images"), path))
    _check_pixels(pixels, path)
    member = _member("labels", _LABELS, members, split, chosen.get("labels"), path)
    labels = label_tensor(small_array(path, member), len(pixels), f"'{path}', array '{member}'")
    listed = next((name for name in members if name.lower() in _CLASSES), None)
    names = [] if listed is None else [str(name) for name in small_array(path, listed).ravel().tolist()]
    return ArrayImages(path, pixels, labels, tuple(names) or names_of_numbers(labels))


def _split(members: Sequence[str], request: DataRequest, path: Path) -> str | None:
    words = {word for name in members for word in name.lower().split("_")}
    splits = [split for split in SPLIT_NAMES if split in words]
    plain = any(name.lower() in _IMAGES for name in members)
    if not splits and request.split is not None:
        raise UserError(f"'{path}' has no splits, so @{request.split} picks nothing; its arrays: {', '.join(members)}")
    if request.split is None and (plain or not splits or "images" in request.settings):
        return None
    return pick_split(splits, request.split, f"'{path}'")


def _member(
    what: str, usual: Sequence[str], members: Sequence[str], split: str | None, named: str | None, path: Path
) -> str:
    listed = f"its arrays: {', '.join(members) or 'none'}"
    if named is not None:
        if named in members:
            return named
        raise UserError(f"'{path}' has no array '{named}'; {listed}{nearest_names(named, members)}")
    allowed = [form for name in usual for form in ([f"{split}_{name}", f"{name}_{split}"] if split else [name])]
    found = [name for name in members if name.lower() in allowed]
    if len(found) == 1:
        return found[0]
    problem = f"several arrays that could be the {what}: {', '.join(found)}" if found else f"no array of {what}"
    raise UserError(f"'{path}' has {problem}; {listed}. Name it with npz:FILE({what}=ARRAY)")


def _check_pixels(pixels: ArrayRows, path: Path) -> None:
    shape, dtype = pixels.shape, pixels.dtype
    gray = len(shape) == 3
    color = len(shape) == 4 and (shape[3] in (1, 3) or shape[1] in (1, 3))
    if not (gray or color) or not (dtype == np.uint8 or dtype.kind == "f"):
        raise UserError(
            f"the images in '{path}' have shape {shape} and type {dtype}; expected (N, H, W, 3), (N, 3, H, W) or "
            f"(N, H, W), as uint8 or as float in [0, 1]"
        )
