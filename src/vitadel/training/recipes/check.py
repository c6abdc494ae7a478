"""Checks of a whole recipe without training: the model is built without memory, and no data is opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.backbones.timm_models import is_timm_name
from vitadel.errors import UserError
from vitadel.training.interfaces import ChecksModel
from vitadel.training.recipes.build import Recipe, build_recipe, data_specs, read_data_spec
from vitadel.training.recipes.compose import compose, is_probe, rows
from vitadel.training.recipes.instantiate import Faults, Faulty, guarded
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.training.starting_model import contradictions

CLASSES = {
    "shapes": 10,
    "cifar10": 10,
    "cifar100": 100,
    "mnist": 10,
    "fashion-mnist": 10,
    "svhn": 10,
    "stl10": 10,
    "flowers102": 102,
    "caltech101": 102,
    "oxford-pets": 37,
    "food101": 101,
    "dtd": 47,
    "fgvc-aircraft": 100,
    "gtsrb": 43,
    "cifar10-c": 10,
    "cifar100-c": 100,
    "imagenet": 1000,
}
"""Numbers of classes of kinds of data."""


def class_count(spec: str) -> int | None:
    """The number of classes, for kinds of data where it is known without opening them."""
    request = read_data_spec(spec, None)
    chosen = request.settings.get("classes", "") if request.kind == "imagenet" else ""
    if chosen:
        return int(chosen) if chosen.isdecimal() else None  # a file says how many
    return CLASSES.get(request.kind)


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


def check_model(recipe: Recipe, where: str) -> None:
    """Build the model as well, without memory for its weights, and pass an image through it; nothing is trained."""
    faults = Faults()
    kept = recipe.model.head_classes
    given = {
        **{name: class_count(spec) for name, spec in data_specs(recipe.data).items()},
        "model.num_classes": recipe.model.num_classes,
        "model.head_classes": None if kept is None else len(kept),
    }
    counts = check_class_counts(given, faults)
    if len(counts) < 2:
        model = faults.attempt("model", meta_model, replace(recipe.model, num_classes=next(iter(counts), 10)))
        checked = {f"plugins.{name}": plugin for name, plugin in recipe.plugins} | {"adapter": recipe.adapter}
        for path, part in checked.items() if model is not None else ():
            if isinstance(part, ChecksModel):
                faults.attempt(path, guarded(part.check_model), model)
    faults.raise_if_any(where)


def check_recipe(name: str, check_probe: Callable[[Mapping[str, Any], str], None]) -> str | None:
    """Everything that is wrong with a recipe, over all its rows, or None; nothing is trained and no data is opened.

    `check_probe` raises `UserError` for a document of a probe recipe.
    """
    try:
        every: list[str | None] = [*rows(name)] or [None]
    except UserError as error:
        return str(error)
    found: dict[str, list[str]] = {}
    for row in every:
        where = name if row is None else f"{name} (row {row})"
        try:
            document = compose(name, row)
            if is_probe(document):
                check_probe(document, where)
            else:
                check_model(build_recipe(document, where), where)
        except UserError as error:
            for fault in error.faults if isinstance(error, Faulty) else (str(error),):
                found.setdefault(fault, []).append(row or "")
    if not found:
        return None
    return str(Faulty(name, (f"{fault}{_in_rows(places, len(every))}" for fault, places in found.items())))


def recipe_warnings(name: str) -> list[str]:
    """What a recipe without faults contradicts in the weights that it starts from, over all its rows."""
    every: list[str | None] = [*rows(name)] or [None]
    documents = [compose(name, row) for row in every]
    starting = [each for each in documents if not is_probe(each) and (each.get("model") or {}).get("weights")]
    return list(dict.fromkeys(text for each in starting for text in contradictions(build_recipe(each, name).model)))


def _in_rows(places: list[str], total: int) -> str:
    return "" if len(places) == total else f" (row{'s' if len(places) > 1 else ''} {', '.join(places)})"
