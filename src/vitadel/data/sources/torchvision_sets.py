"""Classification sets of torchvision, from files on disk: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torchvision.datasets
from PIL.Image import Image
from torch import Tensor

from vitadel.data.images import LabeledImages, to_rgb
from vitadel.data.labels import names_of_numbers
from vitadel.data.spec import DataRequest, pick_split
from vitadel.errors import UserError

_FLAG: Mapping[str, dict[str, Any]] = {"test": {"train": False}, "train": {"train": True}}


def _named(*splits: str, **renamed: str) -> Mapping[str, dict[str, Any]]:
    spelled = {split: split for split in splits} | renamed
    return {split: {"split": spelling} for split, spelling in spelled.items()}


@dataclass(frozen=True)
class _Entry:
    """A torchvision class: the arguments for its splits, and where it keeps labels and file names."""

    cls: str
    splits: Mapping[str, dict[str, Any]]
    labels: Callable[[Any], Sequence[int]]
    files: Callable[[Any], Sequence[Any]] = lambda _: ()
    needs: str | None = None


TORCHVISION_SETS: Mapping[str, _Entry] = {
    "cifar10": _Entry("CIFAR10", _FLAG, lambda data: data.targets),
    "cifar100": _Entry("CIFAR100", _FLAG, lambda data: data.targets),
    "mnist": _Entry("MNIST", _FLAG, lambda data: data.targets),
    "fashion-mnist": _Entry("FashionMNIST", _FLAG, lambda data: data.targets),
    "svhn": _Entry("SVHN", _named("train", "test", "extra"), lambda data: data.labels, needs="scipy"),
    "stl10": _Entry("STL10", _named("train", "test"), lambda data: data.labels),
    "flowers102": _Entry(
        "Flowers102",
        _named("train", "val", "test"),
        lambda data: data._labels,
        lambda data: data._image_files,
        needs="scipy",
    ),
    "oxford-pets": _Entry(
        "OxfordIIITPet",
        _named("trainval", "test", train="trainval"),
        lambda data: data._labels,
        lambda data: data._images,
    ),
    "food101": _Entry("Food101", _named("train", "test"), lambda data: data._labels, lambda data: data._image_files),
    "dtd": _Entry("DTD", _named("train", "val", "test"), lambda data: data._labels, lambda data: data._image_files),
    "fgvc-aircraft": _Entry(
        "FGVCAircraft",
        _named("train", "val", "trainval", "test"),
        lambda data: data._labels,
        lambda data: data._image_files,
    ),
    "gtsrb": _Entry(
        "GTSRB",
        _named("train", "test"),
        lambda data: [label for _, label in data._samples],
        lambda data: [path for path, _ in data._samples],
    ),
}


@dataclass(frozen=True, eq=False)
class TorchvisionImages(LabeledImages):
    """A torchvision data set. torchvision holds sets that are one array in memory, whatever the limit."""

    kind: str
    split: str
    data: Any = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    files: tuple[str, ...] = field(default=(), repr=False)

    def image(self, index: int) -> Image:
        return to_rgb(self.data[index][0])

    def name(self, index: int) -> str:
        return self.files[index] if self.files else f"{self.kind} {self.split} {index}"


def open_torchvision(request: DataRequest) -> TorchvisionImages:
    """Open the set below `--data-root`, in the layout that torchvision creates."""
    request.read_settings()
    if request.argument:
        raise UserError(f"'{request.spec}': {request.kind} takes no path; write {request.kind}, and --data-root DIR")
    entry = TORCHVISION_SETS[request.kind]
    split = pick_split(entry.splits, request.split, request.kind)
    keywords = entry.splits[split]
    try:
        data = getattr(torchvision.datasets, entry.cls)(str(request.root), download=False, **keywords)
    except ImportError as fault:
        needed = entry.needs or fault.name
        raise UserError(f"{request.kind} needs {needed}, which is not installed: pip install {needed}") from None
    except (RuntimeError, OSError, ValueError) as fault:
        call = ", ".join([f"{str(request.root)!r}", *(f"{key}={value!r}" for key, value in keywords.items())])
        raise UserError(
            f"{request.kind}: no complete copy below '{request.root}' ({fault}). Nothing is downloaded automatically: "
            f"give the folder with --data-root, or fetch it with "
            f'python -c "from torchvision.datasets import {entry.cls}; {entry.cls}({call}, download=True)"'
        ) from fault
    targets = torch.as_tensor(entry.labels(data), dtype=torch.int64)
    if not len(targets):
        raise UserError(f"{request.kind}@{split} below '{request.root}' is empty")
    names = getattr(data, "classes", None) or names_of_numbers(targets)
    files = tuple(str(path) for path in entry.files(data))
    return TorchvisionImages(request.kind, split, data, targets, tuple(map(str, names)), files)
