"""`hf:ORG/NAME`: data sets of the Hugging Face Hub, or a folder written by `save_to_disk`, through `datasets`."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL.Image import Image
from torch import Tensor

from vitadel.data.images import LabeledImages, decode
from vitadel.data.labels import IMAGE_NAMES, LABEL_NAMES, number_labels, pick_column
from vitadel.data.spec import DataRequest, pick_split
from vitadel.errors import UserError


@dataclass(frozen=True, eq=False)
class HubImages(LabeledImages):
    """A split whose images stay encoded until they are read; `datasets` memory-maps its files."""

    origin: str
    split: str
    data: Any = field(repr=False)  # the image column alone
    targets: Tensor = field(repr=False)
    classes: tuple[str, ...] = field(repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def name(self, index: int) -> str:
        return f"{self.origin}@{self.split} row {index}"

    def image(self, index: int) -> Image:
        with self._lock:  # `datasets` is not known to be thread-safe; decoding, the slow part, is outside
            (cell,) = self.data[index].values()
        if cell is None:
            raise ValueError("this row has no image")
        content = cell if isinstance(cell, bytes) else cell.get("bytes")
        return decode(Path(cell["path"]).read_bytes() if content is None else content)


def open_hf(request: DataRequest) -> HubImages:
    """Find the columns by type and name; `hf:ORG/NAME(config=...,image=...,label=...)` names them."""
    chosen = request.read_settings(config=str, image=str, label=str)
    if not request.argument:
        raise UserError(f"'{request.spec}' names no data set; write hf:ORG/NAME, or hf:DIR for a saved one")
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs the package datasets: pip install 'vitadel[hf]' (or pip install datasets)") from None
    splits = _splits(datasets, request, chosen.get("config"))
    split = pick_split(splits, request.split, f"'{request.argument}'")
    return _images(datasets, splits[split], request.argument, split, chosen)


def images_of_dataset(data: Any) -> HubImages:
    """The images of a dataset that a Python program has loaded; of several splits the one to test on."""
    import datasets

    splits = dict(data) if isinstance(data, datasets.DatasetDict) else {str(data.split or "test"): data}
    split = pick_split(splits, None, "the dataset") if len(splits) > 1 else next(iter(splits))
    name = getattr(data, "builder_name", None) or "Hugging Face dataset"
    return _images(datasets, splits[split], name, split, {})


def _images(datasets: ModuleType, data: Any, origin: str, split: str, chosen: dict[str, str]) -> HubImages:
    if not len(data):
        raise UserError(f"'{origin}@{split}' has no rows")
    data = data.with_format(None)
    image, label = _columns(datasets, data.features, f"'{origin}'", chosen)
    labels, classes = number_labels(data[label][:], getattr(data.features[label], "names", None))
    column = data.select_columns([image])
    if isinstance(data.features[image], datasets.Image):
        column = column.cast_column(image, datasets.Image(decode=False))
    return HubImages(origin, split, column, labels, classes)


def _splits(datasets: ModuleType, request: DataRequest, config: str | None) -> dict[str, Any]:
    path = Path(os.path.expanduser(request.argument))
    saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(str(path))
        else:
            loaded = datasets.load_dataset(str(path) if path.is_dir() else request.argument, config)
    except Exception as fault:  # network, hub, cache and parsers have their own exceptions
        raise UserError(
            f"'{request.spec}' could not be loaded: {type(fault).__name__}: {fault}. Expected ORG/NAME on the Hugging "
            f"Face Hub (reachable, or in the cache), or a folder written by save_to_disk"
        ) from fault
    if isinstance(loaded, datasets.DatasetDict):
        return dict(loaded)
    return {str(loaded.split or request.split or "test"): loaded}  # a single split may have no name


def _columns(datasets: ModuleType, features: Any, origin: str, chosen: dict[str, str]) -> tuple[str, str]:
    where = f"{origin} (columns: {', '.join(features)})"
    images = [name for name, kind in features.items() if isinstance(kind, datasets.Image) or _dtype(kind) == "binary"]
    named = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    plain = [name for name, kind in features.items() if _dtype(kind).startswith(("int", "uint", "string"))]
    image = pick_column("image", images, IMAGE_NAMES, chosen.get("image"), where)
    if len(named) == 1 and "label" not in chosen:
        return image, named[0]
    labels = list(dict.fromkeys([*named, *plain]))
    return image, pick_column("label", labels, LABEL_NAMES, chosen.get("label"), where)


def _dtype(kind: Any) -> str:
    return str(getattr(kind, "dtype", "")) if type(kind).__name__ == "Value" else ""
