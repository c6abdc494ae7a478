"""`vitadel.benchmark`: RobustBench's `benchmark()` (Croce et al. 2021, arXiv:2010.09670), with the same arguments.

Clean accuracy and accuracy under standard AutoAttack, or on common corruptions, of the first images of a test split.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.errors import UserError, check_known
from vitadel.evaluation.audit.audit import audit
from vitadel.evaluation.model_info import IMAGES, THREATS, model_info, model_info_path, update_model_info
from vitadel.quantities import quantity_text, read_quantity
from vitadel.types import Source

__all__ = ["benchmark"]

_IMAGE_LIST = "imagenet_test_image_ids.txt"
_CORRUPTIONS = (
    *("shot_noise", "motion_blur", "snow", "pixelate", "gaussian_noise", "defocus_blur", "brightness", "fog"),
    *("zoom_blur", "frost", "glass_blur", "impulse_noise", "contrast", "jpeg_compression", "elastic_transform"),
)
_BICUBIC = transforms.InterpolationMode.BICUBIC
_PREPROCESSINGS: dict[str, Callable[[Any], Any]] = {
    "Res256Crop224": transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)]),
    "BicubicRes256Crop224": transforms.Compose([transforms.Resize(256, _BICUBIC), transforms.CenterCrop(224)]),
    "Crop288": transforms.CenterCrop(288),
    "Res224": transforms.Resize([224, 224]),
}


def benchmark(
    model: str | nn.Module,
    n_examples: int = 10_000,
    dataset: str = "cifar10",
    threat_model: str = "Linf",
    to_disk: bool = False,
    model_name: str | None = None,
    data_dir: str | Path = "./data",
    corruptions_data_dir: str | Path | None = None,
    device: Any = None,
    batch_size: int = 32,
    eps: float | str | None = None,
    log_path: str | Path | None = None,
    preprocessing: str | Callable[[Any], Any] | None = None,
    aa_state_path: str | Path | None = None,
) -> tuple[float, float]:
    """Clean accuracy and adversarial accuracy, both as shares, as RobustBench's function of the same name.

    `model` is a module on pixels in [0, 1], or a name as `vitadel audit` takes it. `dataset` is cifar10, cifar100 or
    imagenet below `data_dir`, or any other `--data`; nothing is downloaded. `threat_model` is Linf, L2 (both with
    `eps`) or corruptions. `preprocessing`, for ImageNet: a name of RobustBench or a function of an image; a model with
    a record has its own. With `to_disk` the result goes to model_info/DATASET/THREAT/MODEL_NAME.json. `aa_state_path`
    is a run folder: an interrupted evaluation continues there, and `vitadel report` reads it. A `device` of None is
    the fastest one.
    """
    threat = {name.lower(): name for name in THREATS.values()}.get(str(threat_model).lower())
    if threat is None:
        raise UserError(f"unknown threat_model {threat_model!r}; allowed: {', '.join(THREATS.values())}")
    if (eps is None) == (threat != "corruptions"):
        what = "has no eps; leave it out" if eps is not None else "needs eps, e.g. eps=8/255"
        raise UserError(f"the threat model {threat} {what}")
    if to_disk and model_name is None:
        raise UserError("to_disk=True needs model_name, which becomes the name of the file")
    if isinstance(model, Sequence) and not isinstance(model, str):
        raise UserError(f"benchmark takes one model, got {len(model)}; call it once for each")
    opened = cast(nn.Module, open_model(model)) if isinstance(model, str) else model
    if getattr(opened, "training", False):
        warnings.warn("the model is in train mode; call model.eval() first", stacklevel=2)
    images = _clean_images(dataset, n_examples, Path(data_dir), preprocessing)
    _check_size(opened, dataset, images, given=preprocessing is not None)
    where: dict[str, Any] = {"device": str(device or "auto"), "batch_size": batch_size, "data_root": data_dir}
    if threat == "corruptions":
        clean = audit(model, images, attacks=(), **where)["clean"]["accuracy"]
        corrupted = _corrupted_images(dataset, n_examples, Path(corruptions_data_dir or data_dir))
        robust = audit(model, corrupted, attacks=(), **where)["clean"]["accuracy"]
        entry: dict[str, Any] = {}
    else:
        resume = aa_state_path is not None and (Path(aa_state_path) / "command.json").exists()
        attack: dict[str, Any] = {"eps": cast(float, eps), "norm": threat.lower()}
        found = audit(model, images, attacks=["autoattack"], out=aa_state_path, resume=resume, **attack, **where)
        entry = found["attacks"][0]
        clean, robust = found["clean"]["accuracy"], entry["robust_accuracy"]
    lines = [f"Clean accuracy: {clean:.2%}", f"Adversarial accuracy: {robust:.2%}"]
    sys.stdout.write("\n".join(lines) + "\n")
    if log_path is not None:
        with Path(log_path).open("a", encoding="utf-8") as log:
            log.write("\n".join([*lines, json.dumps(entry)]) + "\n")
    if to_disk:
        text = None if eps is None else quantity_text(read_quantity(eps, "eps"))
        info = model_info(dataset, threat, clean, robust, text)
        update_model_info(model_info_path(dataset, threat, str(model_name)), info)
    return float(clean), float(robust)


@dataclass(frozen=True, eq=False, repr=False)
class _ChosenImages:
    """Some samples of a source, in the given order, each put through `transform`."""

    source: Source
    chosen: tuple[int, ...]
    about: str
    transform: Callable[[Any], Any] | None = field(default=None)

    def __repr__(self) -> str:
        return self.about

    @property
    def classes(self) -> Sequence[str]:
        return self.source.classes

    def __len__(self) -> int:
        return len(self.chosen)

    def labels(self) -> Tensor:
        return self.source.labels()[list(self.chosen)]

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        found = self.source.read([self.chosen[index] for index in indices])
        if self.transform is None:
            return found
        return [image if isinstance(image, Exception) else _as_image(self.transform(image)) for image in found]

    def name(self, index: int) -> str:
        return self.source.name(self.chosen[index])


def _as_image(value: Any) -> Image.Image:
    """What a transform made of an image; a tensor in [0, 1] must be an 8-bit image, as the benchmark's images are."""
    if isinstance(value, Image.Image):
        return value
    levels = torch.as_tensor(value) * 255
    whole = levels.round()
    if (
        levels.ndim != 3
        or float((levels - whole).abs().max()) > 0.01
        or not 0 <= float(whole.min()) <= whole.max() <= 255
    ):
        raise UserError(
            "preprocessing must return an image, or a tensor (3, height, width) of its pixels in [0, 1]; normalization "
            "belongs into the model"
        )
    return Image.fromarray(whole.to(torch.uint8).permute(1, 2, 0).numpy().astype(np.uint8))


def _clean_images(
    dataset: str, count: int, root: Path, preprocessing: str | Callable[[Any], Any] | None
) -> str | Source:
    """The first images of the test split; the name of the whole split if that is what is asked for."""
    spec = _spec(dataset, root)
    source = open_dataset(spec, root=root)
    transform = preprocessing
    if isinstance(transform, str):
        check_known("preprocessing", transform, _PREPROCESSINGS)
        transform = _PREPROCESSINGS[transform]
    if count < 1:
        raise UserError(f"n_examples must be at least 1, got {count}")
    if count >= len(source) and transform is None:
        return spec
    order = range(len(source)) if dataset != "imagenet" else _listed_order(source, root / _IMAGE_LIST)
    return _ChosenImages(source, tuple(order)[:count], f"{spec}, the first {min(count, len(source)):,}", transform)


def _spec(dataset: str, root: Path) -> str:
    if dataset != "imagenet":
        return f"{dataset}@test" if dataset in IMAGES else dataset
    if not (root / _IMAGE_LIST).is_file():
        raise UserError(
            f"RobustBench evaluates 5,000 images of ImageNet, and their list '{root / _IMAGE_LIST}' does not exist. "
            f"Copy robustbench/helper_files/{_IMAGE_LIST} of its repository there."
        )
    return f"imagenet:{root}(list={root / _IMAGE_LIST})"


def _listed_order(source: Source, file: Path) -> list[int]:
    """The samples in the order of the list: a smaller n_examples takes its first lines."""
    place = {source.name(index): index for index in range(len(source))}
    lines = file.read_text("utf-8").split()
    by_ending = {"/".join(Path(name).parts[-2:]): index for name, index in place.items()}
    return [by_ending[line] for line in lines]


def _corrupted_images(dataset: str, count: int, root: Path) -> Source:
    """The first images of every corruption and severity: all are equally many, so their mean is the mean of all."""
    if dataset not in ("cifar10", "cifar100"):
        raise UserError(
            f"corruptions of {dataset} are not part of benchmark(); run `vitadel corruptions MODEL --data "
            "imagenet-c:DIR`"
        )
    source: Any = open_dataset(f"{dataset}-c", root=root)
    missing = [name for name in _CORRUPTIONS if f"{name}/1" not in source.parts]
    if missing:
        raise UserError(
            f"{dataset}-c below '{root}' lacks {', '.join(missing)}; RobustBench averages over 15 corruptions"
        )
    parts = [source.parts[f"{name}/{severity}"] for name in _CORRUPTIONS for severity in range(1, 6)]
    chosen = tuple(index for part in parts for index in part[:count])
    return _ChosenImages(source, chosen, f"{dataset}-c, the first {len(parts[0][:count]):,} of each corruption")


def _check_size(model: nn.Module, dataset: str, images: str | Source, *, given: bool) -> None:
    """Attacks count at the size of the benchmark's images: a model that enlarges them does so inside."""
    record = getattr(model, "record", None)
    size = record.input_size if isinstance(record, ModelRecord) else None
    if dataset in ("cifar10", "cifar100") and size not in (None, (32, 32)):
        raise UserError(
            f"RobustBench attacks {dataset} at 32 x 32 pixels, and this model takes {size[0]} x {size[1]}. Put the "
            "resizing into the model: vitadel.wrap a module that enlarges its input."
        )
    if dataset == "imagenet" and not given and size is None:
        raise UserError(
            "preprocessing must be given for a module of your own, as a function or a name: "
            + ", ".join(_PREPROCESSINGS)
        )
    if given and size is not None and not isinstance(images, str):
        first = next(image for image in images.read([0]))
        if not isinstance(first, Exception) and (first.height, first.width) != size:
            raise UserError(
                f"the preprocessing makes images of {first.height} x {first.width} pixels, and the model takes "
                f"{size[0]} x {size[1]}; leave preprocessing out to use the model's own"
            )
