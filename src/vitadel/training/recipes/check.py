"""Checks of the values in a recipe: models, data, optimizers, trackers, batch sizes; no data is opened."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import timm
import timm.optim
import torch
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitadel.backbones.checkpoints import zoo_names
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.backbones.timm_models import is_timm_name, suggest_models
from vitadel.data.spec import DATA_KINDS, DataRequest, identity, parse_spec, same_images
from vitadel.errors import UserError, nearest_names
from vitadel.training.data_stream import rand_augment_policy
from vitadel.training.recipes.instantiate import Faults, named_attack
from vitadel.training.recipes.training_sections import (
    Augmentation,
    DataSection,
    ModelSection,
    ThreatSection,
    TrainSection,
)
from vitadel.types import Calibrated

_FILES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt")
_CLASSES = {
    "shapes": 10,
    "cifar10": 10,
    "cifar100": 100,
    "mnist": 10,
    "fashion-mnist": 10,
    "svhn": 10,
    "stl10": 10,
    "flowers102": 102,
    "oxford-pets": 37,
    "food101": 101,
    "dtd": 47,
    "fgvc-aircraft": 100,
    "gtsrb": 43,
    "cifar10-c": 10,
    "cifar100-c": 100,
    "imagenet": 1000,
}


def check_values(parts: Mapping[str, Any], threat: ThreatSection, faults: Faults) -> None:
    """Check that what the sections name exists, also in sections with other faults; required keys may be missing."""
    augmentation, optimizer, validation = (parts[name] for name in ("augmentation", "optimizer", "validation"))
    if hasattr(parts.get("model"), "name"):
        faults.attempt("model.name", check_model_name, parts["model"].name)
    if hasattr(parts.get("data"), "train"):
        check_training_data(parts["data"], faults)
    if augmentation.auto_augment is not None:
        faults.attempt("augmentation.auto_augment", rand_augment_policy, augmentation.auto_augment)
    faults.attempt("optimizer.name", check_optimizer_name, optimizer.name)
    if "train" in parts:
        faults.attempt("train.tracker", check_tracker, parts["train"].tracker)
    if validation.attack is not None:
        made: object = named_attack("validation.attack", validation.attack, threat, faults)
        if isinstance(made, Calibrated):
            faults.wrong.append(
                f"validation.attack: '{validation.attack}' first studies the model on other images, which validation "
                "has no time for; put it into audit.attacks"
            )
    for name in parts["audit"].attacks:
        named_attack("audit.attacks", name, threat, faults)


def check_sections_agree(parts: Mapping[str, Any], faults: Faults) -> None:
    """Check settings that depend on those of another section."""
    data, train, augmentation = parts.get("data"), parts.get("train"), parts.get("augmentation")
    if train is not None and augmentation is not None:
        faults.attempt("train.batch_size", check_micro_batches, train, augmentation)
    if train is not None and data is not None:
        faults.attempt("data.extra_share", check_extra_share, data, train)


def check_model_name(name: str) -> None:
    """Refuse names that are no timm model, zoo model or path; others are checked when they are opened."""
    kind, colon, _ = name.partition(":")
    if colon and kind == "zoo" and name not in zoo_names():
        there = ", ".join(zoo_names()) or "none in this installation"
        raise UserError(f"unknown zoo model '{name}'; there is {there}{nearest_names(name, zoo_names())}")
    if colon and kind in ("zoo", "hf", "python"):
        return
    looks_like_a_path = "/" in name or name.startswith((".", "~")) or name.endswith(_FILES) or Path(name).exists()
    if not is_timm_name(name) and not looks_like_a_path:
        near = suggest_models(name.partition(".")[0], zoo_names())
        raise UserError(
            f"unknown model '{name}'{near} It is no timm name, no file and no folder; see `vitadel list models`"
        )


def check_optimizer_name(name: str) -> None:
    known = timm.optim.list_optimizers()
    if name not in known:
        raise UserError(
            f"timm has no optimizer '{name}'{nearest_names(name, known) or '; common ones are adamw and momentum'}"
        )
    if name == "adahessian":
        raise UserError(
            "'adahessian' needs second derivatives, which the loop does not compute; use e.g. adamw or momentum"
        )


def check_tracker(name: str) -> None:
    known = [kind.value for kind in LoggerType]
    if name not in ("none", *known):
        raise UserError(f"there is no tracker '{name}'; there is none, {', '.join(known)}{nearest_names(name, known)}")
    installed = [kind.value for kind in get_available_trackers()]
    if name not in ("none", "all", *installed):
        raise UserError(
            f"'{name}' is not installed; install it, or take one of none{''.join(f', {other}' for other in installed)}"
        )


def check_micro_batches(train: TrainSection, augmentation: Augmentation, processes: int = 1) -> None:
    """Refuse a batch that `grad_accum` does not divide; several processes divide each micro-batch further."""
    if train.batch_size % train.grad_accum:
        raise UserError(f"a batch of {train.batch_size} images cannot be split into {train.grad_accum} equal parts")
    parts = train.grad_accum * processes
    if train.batch_size // parts % 2 and (augmentation.mixup or augmentation.cutmix):
        shared = f" in {processes} processes" if processes > 1 else ""
        raise UserError(
            f"mixup and cutmix mix images in pairs, so each micro-batch needs an even number of images; batch_size "
            f"{train.batch_size} with grad_accum {train.grad_accum}{shared} gives {train.batch_size // parts}; choose "
            f"a multiple of {2 * parts} for train.batch_size"
        )


def check_extra_share(data: DataSection, train: TrainSection) -> None:
    extra = round(data.extra_share * train.batch_size)
    if data.extra is not None and extra in (0, train.batch_size):
        what = "no image" if extra == 0 else "every image"
        raise UserError(
            f"with {data.extra_share:g} of a batch of {train.batch_size}, {what} would come from data.extra; choose "
            "another share or a larger train.batch_size"
        )


def read_data_spec(spec: str, root: str | None) -> DataRequest:
    """Parse a data spec and check its kind and path; the data is not opened."""
    request = parse_spec(spec, root=Path(root or "data"), split=None)
    kind = DATA_KINDS.get(request.kind)
    if kind is None:
        near = nearest_names(request.kind, DATA_KINDS) or "."
        raise UserError(f"unknown data '{spec}'{near} Known: {', '.join(DATA_KINDS)}")
    if ":" in kind.form and not request.argument:
        raise UserError(f"'{spec}' names no path; write {kind.form}")
    if ":" in spec and ":" not in kind.form:
        raise UserError(f"'{spec}': {request.kind} takes no path; write {kind.form}, and data.root if need be")
    return request


def class_count(spec: str) -> int | None:
    """The number of classes, for kinds of data where it is known without opening them."""
    request = read_data_spec(spec, None)
    chosen = request.settings.get("classes", "") if request.kind == "imagenet" else ""
    if chosen:
        return int(chosen) if chosen.isdecimal() else None  # a file says how many
    return _CLASSES.get(request.kind)


def check_class_counts(counts: Mapping[str, int | None], faults: Faults) -> set[int]:
    """The numbers of classes that are known; a fault is added if there are several."""
    known = {name: count for name, count in counts.items() if count is not None}
    if len(set(known.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in known.items())
        faults.wrong.append(f"data: the numbers of classes do not agree: {listed}")
    return set(known.values())


@contextmanager
def without_numbers(name: str) -> Iterator[None]:
    """The meta device; other models than timm's read their weights, which are small ones of the zoo, or the user's."""
    if is_timm_name(name):
        with torch.device("meta"), _UnfilledTensors():
            yield
    else:
        yield


class _UnfilledTensors(TorchFunctionMode):
    """Leaves out what fills tensors without memory with initial values: half of the time of building a model."""

    filling = (Tensor.uniform_, Tensor.normal_, Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.filling and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


def meta_model(section: ModelSection) -> Classifier | None:
    """The model of a section without memory for its weights, after a forward pass; `UserError` if it cannot be built.

    Rows of a table share a cached model: do not change it. Zoo models are loaded. None for files and the user's own
    code, which are checked when the training starts.
    """
    # Values such as dates are no arguments of any model; as texts they are reported as such.
    return _meta_model(json.dumps(asdict(section), default=str))


@lru_cache(maxsize=64)
def _meta_model(section: str) -> Classifier | None:
    model = ModelSection(**json.loads(section))
    from_zoo = model.name.startswith("zoo:")
    if not from_zoo and not is_timm_name(model.name):
        return None
    try:
        with without_numbers(model.name), torch.no_grad():
            classifier = load_model(
                model.name,
                weights=None if from_zoo else "random",
                num_classes=model.num_classes,
                new_head=from_zoo,
                device="cpu" if from_zoo else "meta",
                **model.options(),
            )
            height, width = classifier.record.input_size or (224, 224)
            logits = classifier(torch.zeros(2, 3, height, width))
    except UserError as mistake:
        raise UserError(str(mistake).splitlines()[0]) from mistake
    except Exception as error:  # arguments that make no sense fail inside timm's models in every way there is
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(f"'{model.name}' cannot be built: {type(error).__name__}: {reason}") from error
    expected = (2, model.num_classes)
    if logits.shape != expected:
        raise UserError(f"it gives logits of shape {tuple(logits.shape)}, expected {expected}")
    return classifier


def data_specs(data: DataSection) -> dict[str, str]:
    specs = {name: getattr(data, name) for name in ("train", "test", "validation", "extra", "easier")}
    return {name: spec for name, spec in specs.items() if spec is not None}


def check_training_data(data: DataSection, faults: Faults) -> None:
    """Check all data specs, and that no model is selected or tested on images it is trained on."""
    requests = {name: _request(f"data.{name}", spec, data, faults) for name, spec in data_specs(data).items()}
    train, test = requests["train"], requests.pop("test", None)
    _check_selection(data, requests, faults)
    if not names_split(train, faults):
        del requests["train"]
    for name, request in requests.items():
        check_not_test(f"data.{name}", request, test, "selected" if name == "validation" else "trained", faults)


def names_split(train: DataRequest | None, faults: Faults) -> bool:
    """Whether training data of a kind with splits names its split; a fault is added if not."""
    if train is None or train.split is not None or ":" in DATA_KINDS[train.kind].form:
        return True
    faults.wrong.append(f"data.train: '{train.spec}' means the test images; write {train.spec}@train")
    return False


def check_not_test(path: str, request: DataRequest | None, test: DataRequest | None, use: str, faults: Faults) -> None:
    """Add a fault if the images are those of the test set; they are `use`d ('trained', 'selected') on."""
    if request is not None and test is not None and faults.attempt(path, same_images, request, test):
        faults.wrong.append(
            f"{path}: '{request.spec}' are the images of data.test, '{test.spec}': a model {use} on them is not tested "
            "by them; choose another split"
        )


def _request(path: str, spec: str, data: DataSection, faults: Faults) -> DataRequest | None:
    """The parsed spec; None if it is wrong, which is reported once, whatever it is compared with later."""
    request = faults.attempt(path, read_data_spec, spec, data.root)
    return request if request is not None and faults.attempt(path, identity, request) is not None else None


def _check_selection(data: DataSection, requests: Mapping[str, DataRequest | None], faults: Faults) -> None:
    """Models are selected on data.validation, or on images held out from data.train: never on what they train on."""
    trained = ("train", "easier", "extra") if data.validation is not None else ("extra",)
    selected = requests["train"] if data.validation is None else requests["validation"]
    for name in trained:
        request = requests.get(name)
        if request and selected and same_images(request, selected):
            faults.wrong.append(
                f"data.{name}: '{request.spec}' holds the images that models are selected on, '{selected.spec}'; "
                "choose another split"
            )
