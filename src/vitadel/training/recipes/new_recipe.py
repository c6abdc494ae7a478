"""`vitadel recipes new`: a recipe for one's own model and data, with every common key and why it has its value."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm

from vitadel.backbones.record import ModelRecord
from vitadel.data import open_dataset
from vitadel.errors import UserError, check_known
from vitadel.quantities import quantity_text, read_quantity
from vitadel.training.recipes.training_sections import ModelSection, ThreatSection
from vitadel.training.starting_model import starting_model
from vitadel.types import Source

_SEEN = 40_000  # images that fine-tuning looks at, in all epochs; training from random weights takes ten times as many
_HELD_OUT, _MOST_HELD_OUT = 0.1, 500
_FEW = 20  # images per class

OBJECTIVES: dict[str, Callable[[str, str], str]] = {
    "trades": lambda eps, step: f"{{use: trades, beta: 6, attack: kl-3(step={step})}}",
    "adversarial": lambda eps, step: f"{{use: adversarial, attack: pgd-3(step={step})}}",
    "mart": lambda eps, step: f'{{use: mart, beta: 5, attack: "pgd-3(step={step},noise=0.001)"}}',
    "standard": lambda eps, step: "{use: standard}",
}
"""Objectives that train a whole model, with the attack that fits eps; others need more than a model and data."""


@dataclass(frozen=True)
class NewRecipe:
    """The text of the file, and what its reader should know before training."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Data:
    train: str
    test: str | None
    validation: str | None
    source: Source

    @classmethod
    def find(cls, spec: str, root: Path | None) -> _Data:
        """The splits of the data; a spec with a split is used for training only."""
        splits = {} if "@" in spec else {name: _opened(f"{spec}@{name}", root) for name in ("train", "val", "test")}
        found = {name: source for name, source in splits.items() if source is not None}
        if "train" not in found or len(found) == 1:
            return cls(spec, None, None, open_dataset(spec, root=root))
        test = "test" if "test" in found else "val"
        validation = f"{spec}@val" if test == "test" and "val" in found else None
        return cls(f"{spec}@train", f"{spec}@{test}", validation, found["train"])


def _opened(spec: str, root: Path | None) -> Source | None:
    try:
        return open_dataset(spec, root=root)
    except UserError:
        return None


def new_recipe(
    model: str, data: str, *, weights: str | None, objective: str, eps: str = "4/255", root: Path | None = None
) -> NewRecipe:
    """Look at model and data, and write the recipe that fits them; a `UserError` if they do not open."""
    check_known("objective for a new recipe", objective, tuple(OBJECTIVES))
    budget = ThreatSection(eps=read_quantity(eps, "eps")).eps
    found = _Data.find(data, root)
    count, classes = len(found.source), len(found.source.classes)
    start = starting_model(ModelSection(model, weights), classes, found.train)
    held_out = 0 if found.validation else min(max(classes, round(_HELD_OUT * count)), _MOST_HELD_OUT)
    images = count - held_out
    if images < 4 * classes:
        raise UserError(
            f"{found.train} has {count} images of {classes} classes, too few to train on; give at least "
            f"{5 * classes}, with more than one image of each class"
        )
    random = weights is None and timm.is_model(model)
    notes = [f"no --weights: {model} starts from random weights, which needs far more images"] if random else []
    if start.fresh_head:
        notes.append(f"{weights or model} has a head for other classes: it gets a new one for these {classes}")
    notes += _notes_about_data(found, start.classifier.record, count)
    sizes = _Sizes.of(images, held_out, not random)
    text = _text(model, weights, found, start.classifier.record, objective, budget, sizes)
    return NewRecipe(text, tuple(notes))


@dataclass(frozen=True)
class _Sizes:
    batch: int
    epochs: int
    held_out: int
    lr: str
    warmup: float

    @classmethod
    def of(cls, images: int, held_out: int, pretrained: bool) -> _Sizes:
        batch = next((size for size in (64, 32, 16, 8) if images >= 8 * size), 4)
        seen = _SEEN if pretrained else 10 * _SEEN
        epochs = min(max(round(seen / images), 5), 40 if pretrained else 200)
        return cls(batch, epochs, held_out, "1e-4" if pretrained else "1e-3", round(0.1 * epochs, 1))


def _notes_about_data(data: _Data, record: ModelRecord, count: int) -> list[str]:
    notes, classes = [], len(data.source.classes)
    if data.test is None:
        notes.append("the data has no test split, so there is no audit: set data.test, or make folders train and test")
    if count < _FEW * classes:
        notes.append(f"{count} images of {classes} classes are few: expect a wide interval and overfitting")
    image = data.source.read([0])[0]
    if record.input_size and not isinstance(image, Exception) and max(image.size) < max(record.input_size):
        notes.append(f"images of {image.size[0]} x {image.size[1]} px are enlarged to {record.input_size[0]} px")
    return notes


def _numbers(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _text(
    model: str, weights: str | None, data: _Data, record: ModelRecord, objective: str, eps: float, sizes: _Sizes
) -> str:
    """YAML; strings of the user's are quoted as JSON, which YAML reads."""
    classes, budget = len(data.source.classes), quantity_text(eps)
    step = quantity_text(eps * 0.75)
    by_name = timm.is_model(model)  # other models bring these with them, and take no other values
    size = record.input_size[0] if record.input_size and by_name else None
    quoted = json.dumps
    validation = f"validation: {quoted(data.validation)}" if data.validation else "validation: null"
    return f"""# {objective.upper()} of {model} on {data.train}, made by `vitadel recipes new`. This file is FILE:
# check: vitadel recipes check FILE    time: vitadel plan FILE    train: vitadel harden FILE --out runs/mine
about: {quoted(f"{model} on {data.train}: {objective} at {budget}")}

model:
  name: {quoted(model)}
  weights: {"null" if weights is None else quoted(weights)}
  num_classes: null  # the data's {classes}; a checkpoint with another number gets a new head
  # Normalization and size are the model's own; other values would contradict its weights.
  mean: {_numbers(record.mean) if by_name else "null"}
  std: {_numbers(record.std) if by_name else "null"}
  input_size: {"null" if size is None else size}
  drop_path: 0.0  # stochastic depth; robust fine-tuning rarely needs it

data:
  train: {quoted(data.train)}  # {len(data.source):,} images
  test: {"null" if data.test is None else quoted(data.test)}  # audited once, at the end; never used to choose anything
  {validation}  # images to choose the best epoch by, or
  held_out: {sizes.held_out}  # so many training images, the same share of each class
  limit: null  # train on a class-balanced part, e.g. 200 for a trial
  workers: 0  # processes that read images

augmentation:
  crop: resized  # a random part of the image, of this share of its area
  scale: [0.5, 1.0]
  hflip: 0.5  # 0 if left and right matter

threat:
  norm: linf
  eps: {budget}  # of pixels in [0, 1]; 4/255 is usual for photographs, 8/255 for 32 px

objective: {OBJECTIVES[objective](budget, step)}

optimizer:
  name: adamw
  lr: {sizes.lr}
  weight_decay: 0.05
  clip_grad_norm: 1.0

schedule:
  shape: cosine
  warmup_epochs: {sizes.warmup:g}  # a tenth of the epochs
  min_lr: 0

train:
  epochs: {sizes.epochs}
  batch_size: {sizes.batch}  # images per step
  grad_accum: 1  # 2 halves the memory of a step
  amp_dtype: auto  # bf16 on a GPU that has it, else fp32; bf16 is faster on new CPUs, too
  seed: 0
  checkpoint_every: 200  # steps; `--resume` continues from the last one
  tracker: none  # tensorboard writes curves for it

validation:
  attack: {"null" if objective == "standard" else "pgd-10"}
  every: 1  # epochs
  limit: 200  # images

audit:
  attacks: [autoattack-fast]
  limit: 500
  batch_size: {sizes.batch}
"""
