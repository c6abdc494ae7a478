"""Data that a Python program has in hand: tensors or arrays, a Dataset, a DataLoader, a Hugging Face dataset."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from vitadel.data.images import LabeledImages, from_array, to_rgb
from vitadel.data.labels import IMAGE_NAMES, LABEL_NAMES
from vitadel.errors import UserError
from vitadel.types import Source

_X_NAMES = (*IMAGE_NAMES, "x", "pixel_values", "input", "inputs", "data")
_FORMS = (
    "Give tensors or arrays (x, y) with pixels in [0, 1] or uint8, a torch Dataset or DataLoader, a Hugging Face "
    "dataset, a path, or a spec such as 'folder:DIR'."
)


def source_of(data: Any) -> Source:
    """A source from what a caller has in hand; a `UserError` that says what to give instead for anything else."""
    if all(callable(getattr(data, name, None)) for name in ("labels", "read", "name")):
        return cast(Source, data)
    if isinstance(data, DataLoader):
        return _of_loader(data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return source_of_tensors(*data.tensors)
    if _is_pair(data):
        return source_of_tensors(*data)
    if type(data).__module__.partition(".")[0] == "datasets":
        return _of_hugging_face(data)
    if isinstance(data, IterableDataset | Iterator):
        raise UserError(
            f"a {type(data).__name__} has no length and may never end, and its samples have no stable indices. Collect "
            "the images to audit first: x, y = next(iter(DataLoader(data, batch_size=1000))), then give (x, y)."
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | Mapping):
        return _of_dataset(data)
    keys = f" with the keys {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
    raise UserError(f"data of type {type(data).__name__}{keys} cannot be read. {_FORMS}")


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_pair(data: object) -> bool:
    if not isinstance(data, list | tuple) or len(data) != 2:
        return False
    return _is_array(data[0]) and data[0].ndim >= 3 and (_is_array(data[1]) or isinstance(data[1], list | tuple))


@dataclass(frozen=True, eq=False)
class TensorImages(LabeledImages):
    """Images in memory. Float pixels reach the model as they are, without rounding to 8 bits."""

    pixels: Tensor = field(repr=False)  # uint8 or float32, (n, 3, height, width)
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    digest: str

    def __repr__(self) -> str:
        return f"tensors of {' x '.join(map(str, self.pixels.shape))} ({self.digest})"

    def image(self, index: int) -> Image.Image:
        return from_array(self.pixels[index].numpy())

    def read_exactly(self, indices: Sequence[int], shape: tuple[int, int]) -> list[Tensor | Exception] | None:
        """The pixels themselves, if they have the shape (height, width) already."""
        fits = tuple(self.pixels.shape[2:]) == shape
        return [self.pixels[index] for index in indices] if fits else None

    def name(self, index: int) -> str:
        return f"image {index}"


def source_of_tensors(x: Any, y: Any) -> TensorImages:
    """Check pixels and labels, and bring them into one form."""
    pixels = _pixels(torch.as_tensor(x).detach().cpu())
    labels = check_label_values(torch.as_tensor(y).detach().cpu(), len(pixels))
    digest = hashlib.sha256(np.ascontiguousarray(pixels.numpy()).tobytes()).hexdigest()[:12]
    classes = tuple(map(str, range(int(labels.max()) + 1)))
    return TensorImages(pixels, labels, classes, digest)


def _pixels(x: Tensor) -> Tensor:
    shape = tuple(x.shape)
    if x.ndim != 4 or not len(x):
        raise UserError(f"images must have shape (n, 3, height, width), got {shape}. {_FORMS}")
    if shape[1] not in (1, 3) and shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.shape[1] not in (1, 3):
        raise UserError(f"images must have 1 or 3 color channels, (n, 3, height, width); got shape {shape}")
    x = x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x
    if x.dtype == torch.uint8:
        if int(x.max()) <= 1:
            raise UserError("all uint8 pixels are 0 or 1: they were in [0, 1] and lost in a conversion. Give floats.")
        return x.contiguous()
    if not x.is_floating_point():
        raise UserError(f"images must be uint8 or floating point, got {x.dtype}. Convert them: x.float() / 255.")
    low, high = float(x.min()), float(x.max())
    problem = range_problem(low, high, bool(x.isfinite().all()))
    if problem:
        raise UserError(problem)
    return x.to(torch.float32).clamp(0, 1).contiguous()


def range_problem(low: float, high: float, finite: bool = True) -> str:
    """What is wrong with float pixels of this range, and what to do; empty if they are in [0, 1]."""
    if not finite:
        return "images hold NaN or infinite values. Check how they were loaded."
    if low < -1e-6:
        return (
            f"images must be pixels in [0, 1], got {low:.4g} to {high:.4g}: they are normalized already. Drop "
            "Normalize from the transform and let the model normalize: vitadel.wrap(model, mean=..., std=...)."
        )
    if high > 1 + 1e-6:
        return f"images must be pixels in [0, 1], got {low:.4g} to {high:.4g}. Divide by 255, or give uint8."
    if high <= 1.01 / 255:
        return f"images fill only [0, {high:.4g}]: they were divided by 255 twice. Divide once."
    return ""


def check_label_values(y: Tensor, n: int) -> Tensor:
    """Labels as int64, one per image."""
    if y.ndim == 2 and y.shape[1] > 1:
        raise UserError(f"labels of shape {tuple(y.shape)} look one-hot. Give class numbers: y.argmax(1).")
    y = y.flatten() if y.ndim == 2 else y
    if y.ndim != 1 or len(y) != n:
        raise UserError(f"there must be one label per image: {n} images, labels of shape {tuple(y.shape)}")
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise UserError("labels must be whole numbers, the numbers of the model's outputs")
    labels = y.to(torch.int64)
    if int(labels.min()) < 0:
        raise UserError(f"labels must be 0 or more, got {int(labels.min())}. Leave out images without a label.")
    return labels


@dataclass(frozen=True, eq=False)
class DatasetImages(LabeledImages):
    """A map-style dataset of pairs or dictionaries, read item by item."""

    origin: str
    data: Any = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    keys: tuple[Any, Any] = field(default=(0, 1), repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __repr__(self) -> str:
        return f"{self.origin} of {len(self.targets)}"

    def image(self, index: int) -> Image.Image:
        return as_image(self._cell(index))

    def _cell(self, index: int) -> Any:
        with self._lock:  # a user's dataset may not be safe in several threads
            return self.data[index][self.keys[0]]

    def read_exactly(self, indices: Sequence[int], shape: tuple[int, int]) -> list[Tensor | Exception] | None:
        """Tensors that have the shape (height, width) already, as they are; None if one of the images is another."""
        cells = []
        for index in indices:
            try:
                cell = self._cell(index)
            except Exception:  # reported when it is read as an image
                return None
            if not isinstance(cell, Tensor) or cell.ndim != 3 or tuple(cell.shape[1:]) != shape:
                return None
            cells.append(_pixels(cell.detach().cpu()[None])[0])
        return list(cells)

    def name(self, index: int) -> str:
        return f"{self.origin} item {index}"


def as_image(cell: Any) -> Image.Image:
    """An RGB image from what a dataset gives: a Pillow image, an array or a tensor."""
    if isinstance(cell, Image.Image):
        return to_rgb(cell)
    array: NDArray[np.generic] = np.asarray(cell.detach().cpu() if isinstance(cell, Tensor) else cell)
    if array.dtype != np.uint8 and array.dtype.kind == "f":
        problem = range_problem(float(array.min()), float(array.max()), bool(np.isfinite(array).all()))
        if problem:
            raise UserError(problem)
    return from_array(array)


def _of_loader(loader: DataLoader[Any]) -> Source:
    """The loader's dataset, in its own order: indices are then stable, also if the loader shuffles."""
    if isinstance(loader.dataset, IterableDataset):
        return source_of(loader.dataset)
    plain = loader.collate_fn is default_collate or loader.collate_fn is torch.utils.data.default_convert
    if not plain or not isinstance(loader.sampler, SequentialSampler | RandomSampler):
        what = "a collate_fn" if not plain else f"a {type(loader.sampler).__name__}"
        raise UserError(
            f"this DataLoader has {what} of its own, so its batches cannot be read by stable indices. Give its dataset "
            "(a torch.utils.data.Subset for some of it), or the images themselves as tensors (x, y)."
        )
    return source_of(loader.dataset)


def shuffles(data: object) -> bool:
    """Whether this is a DataLoader whose order differs from that of its dataset."""
    return isinstance(data, DataLoader) and isinstance(data.sampler, RandomSampler)


def _of_dataset(data: Any) -> Source:
    if not len(data):
        raise UserError(f"the {type(data).__name__} is empty")
    first = data[0]
    keys = _keys(first, type(data).__name__)
    _check_image(first[keys[0]], data[0][keys[0]], type(data).__name__)
    labels = _labels_of(data, keys[1])
    targets = check_label_values(torch.as_tensor(np.asarray(labels)), len(data))
    names = _class_names(data) or tuple(map(str, range(int(targets.max()) + 1)))
    return DatasetImages(type(data).__name__, data, targets, names, keys)


def _keys(item: Any, what: str) -> tuple[Any, Any]:
    """Where image and label are in an item."""
    if isinstance(item, Mapping):
        found = [[key for key in item if str(key).lower() in names] for names in (_X_NAMES, LABEL_NAMES)]
        if all(len(each) == 1 for each in found):
            return found[0][0], found[1][0]
        raise UserError(
            f"items of the {what} are dictionaries with the keys {', '.join(map(repr, item))}; expected one such as "
            "'image' and one such as 'label'. Give pairs: [(item[IMAGE], item[LABEL]) for item in data], or rename."
        )
    if isinstance(item, list | tuple) and len(item) >= 2:
        return 0, 1
    raise UserError(f"items of the {what} are of type {type(item).__name__}; expected pairs (image, label). {_FORMS}")


def _check_image(cell: Any, again: Any, what: str) -> None:
    if not isinstance(cell, Image.Image | Tensor | np.ndarray):
        raise UserError(
            f"images of the {what} are of type {type(cell).__name__}; expected tensors, arrays or Pillow images"
        )
    if not np.array_equal(np.asarray(cell), np.asarray(again)):
        raise UserError(
            f"the {what} gives different pixels for one item in two calls: it has random transforms. Give the "
            "transform of the evaluation, without augmentation."
        )
    as_image(cell)  # reports pixels that are not in [0, 1]


def _labels_of(data: Any, key: Any) -> Sequence[Any]:
    """All labels, without reading images where the dataset lists them."""
    if isinstance(data, Subset):
        inner = _labels_of(data.dataset, key)
        return [inner[index] for index in data.indices]
    for name in ("targets", "labels", "_labels"):
        listed = getattr(data, name, None)
        as_they_are = getattr(data, "target_transform", None) is None and not callable(listed)
        if listed is not None and as_they_are and len(listed) == len(data):
            return cast(Sequence[Any], listed)
    return [data[index][key] for index in range(len(data))]


def _class_names(data: Any) -> tuple[str, ...]:
    if isinstance(data, Subset):
        return _class_names(data.dataset)
    listed = getattr(data, "classes", None)
    if not isinstance(listed, list | tuple):
        return ()
    return tuple(", ".join(map(str, name)) if isinstance(name, list | tuple) else str(name) for name in listed)


def _of_hugging_face(data: Any) -> Source:
    from vitadel.data.sources.hf import images_of_dataset

    if "Iterable" in type(data).__name__:
        raise UserError(
            "a streamed Hugging Face dataset has no length and no stable indices. Load it without streaming=True, or "
            "collect the images to audit and give tensors (x, y)."
        )
    return images_of_dataset(data)
