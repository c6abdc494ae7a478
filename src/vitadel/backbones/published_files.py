"""Weight files of published models: load one as `published:NAME`, recognize one that was given under another name.

Nothing is downloaded. Keys and shapes decide what a file can be; its container and its name what it likely is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.backbones.checkpoints import Checkpoint, build_classifier, load_strict, read_checkpoint
from vitadel.backbones.key_conversion import convert_keys
from vitadel.backbones.published import (
    Published,
    catalogue,
    describe_normalization,
    describe_resizing,
    find_published,
)
from vitadel.backbones.record import ASSUMED, LOOKS_LIKE, ModelRecord
from vitadel.backbones.robustbench_cache import find_in_cache
from vitadel.errors import UserError

__all__ = ["describe_assumptions", "open_published", "recognize", "suggest_published"]

_TOLERANCE = 0.01  # of the number of parameters, to preselect candidates before they are built
_SHOWN = 6  # of the models that a file may be
Shapes = dict[str, tuple[int, ...]]


def open_published(
    name: str, weights: str | Path | None, kwargs: Mapping[str, Any], *, own_normalization: bool = False
) -> tuple[nn.Module, ModelRecord]:
    """Build the model and load its file strictly; `own_normalization`: the user overrides that of the model."""
    published = find_published(name)
    if weights is None or weights == "pretrained":
        raise UserError(
            f"'{published.spec}' needs its weights as --weights FILE, or a cache folder of RobustBench; vitadel "
            "does not download them. "
            f"They are to be had here: {published.where}."
        )
    if weights == "random":
        record = published.record(kwargs)
        return build_classifier(record).backbone, replace(
            record, notes=record.notes | {"weights": "random: an untrained model"}
        )
    path = Path(os.path.expanduser(str(weights)))
    path = find_in_cache(path, published) if path.is_dir() else path
    checkpoint = read_checkpoint(path)
    record = _fitting_record(published, checkpoint.weights, kwargs)
    backbone = build_classifier(record).backbone
    try:
        fitted = load_strict(backbone, checkpoint.weights, str(path))
    except UserError as error:
        others = [each.spec for each in recognize(checkpoint.weights) if each is not published]
        hint = f" The file fits {_listed(others)}." if others else ""
        raise UserError(f"{error}{hint} '{published.spec}' is {published.model} of {published.where}.") from error
    if fitted.normalizer is not None and not own_normalization:
        _check_normalizer(published, fitted.normalizer, path)
    notes = "; ".join((*checkpoint.notes, *fitted.notes))
    return backbone, replace(record, notes=record.notes | ({"weights": notes} if notes else {}))


def _fitting_record(published: Published, weights: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> ModelRecord:
    """The record of the variant that the file has; the first one if none fits."""
    for variant in published.variants:
        record = published.record({**variant, **kwargs})
        if _fits(record, weights):
            return record
    return published.record(kwargs)


def _check_normalizer(published: Published, found: tuple[tuple[float, ...], tuple[float, ...]], path: Path) -> None:
    expected = (*published.mean, *published.std)
    if max(abs(a - b) for a, b in zip((*found[0], *found[1]), expected, strict=True)) > 1e-3:
        raise UserError(
            f"'{path}' has a normalization layer with {describe_normalization(*found)}, but '{published.spec}' was "
            f"published with {published.normalization}. It is another model's file, or was "
            "saved with a wrong layer. To use other numbers, give them as --mean and --std."
        )


def _meta(record: ModelRecord) -> nn.Module | None:
    """The model without memory for its weights; None if its constructor needs values."""
    try:
        with torch.device("meta"):
            return build_classifier(record).backbone
    except (RuntimeError, NotImplementedError, TypeError):
        return None


@cache
def _skeleton(name: str, classes: int | None, kwargs: tuple[tuple[str, Any], ...], small: int | None) -> Any:
    return _meta(ModelRecord(name=name, num_classes=classes, kwargs=dict(kwargs), small_images=small))


def _fits(record: ModelRecord, weights: Mapping[str, Tensor]) -> bool:
    module = _skeleton(record.name, record.num_classes, tuple(sorted(record.kwargs.items())), record.small_images)
    if module is None:
        return False
    own: Shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    return own == {key: tuple(value.shape) for key, value in convert_keys(module, weights).weights.items()}


def recognize(
    weights: Mapping[str, Tensor], like: Checkpoint | None = None, path: Path | None = None
) -> list[Published]:
    """The published models whose keys and shapes a file has; the likely ones only, if its container or name says so."""
    count = sum(value.numel() for value in weights.values() if value.is_floating_point())
    close = [each for each in catalogue() if _is_close(each, weights, count)]
    found = [each for each in close if any(_fits(each.record(kwargs), weights) for kwargs in ({}, *each.variants))]
    scores = [_score(each, weights, like, path) for each in found]
    return [each for each, score in zip(found, scores, strict=True) if score == max(scores)]


def _is_close(published: Published, weights: Mapping[str, Tensor], count: int) -> bool:
    towers = published.embedding is not None and any(key.startswith("visual.") for key in weights)
    return towers or abs(count - published.parameters) <= _TOLERANCE * published.parameters


def _score(published: Published, weights: Mapping[str, Tensor], like: Checkpoint | None, path: Path | None) -> int:
    named = path is not None and published.file is not None and Path(published.file).name.lower() == path.name.lower()
    holds = like is not None and published.holds and set(published.holds) <= set(like.container)
    prefixed = bool(published.prefix) and any(published.prefix in key for key in weights)
    return 8 * bool(named) + 2 * bool(holds) + prefixed


def _listed(specs: list[str]) -> str:
    shown = ", ".join(specs[:_SHOWN])
    return f"{shown} and {len(specs) - _SHOWN} more" if len(specs) > _SHOWN else shown


def suggest_published(checkpoint: Checkpoint, path: Path) -> str:
    """A sentence for a file that was refused under another name, if it is one of a published model."""
    found = recognize(checkpoint.weights, checkpoint, path)
    if not found:
        return ""
    return f" The file looks like {_listed([each.spec for each in found])}: use that as MODEL."


def describe_assumptions(
    record: ModelRecord, checkpoint: Checkpoint, path: Path, *, normalization: bool, resizing: bool
) -> dict[str, str]:
    """Notes on what a foreign file under a plain name leaves open: what was assumed, and what it looks like.

    `normalization` and `resizing` say which of the two were taken from the name, not from the user or the file.
    """
    notes = {}
    taken = _Preprocessing.of(record)
    assumed = [taken.normalization] * normalization + [taken.resizing] * resizing
    if assumed:
        flags = ["--mean, --std or --no-normalize"] * normalization + ["--crop-pct, --crop-mode"] * resizing
        notes[ASSUMED] = (
            f"{' and '.join(assumed)}, which are timm's for '{record.name}': '{path.name}' does not say how it was "
            f"trained. Other values: {', '.join(flags)}."
        )
    found = recognize(checkpoint.weights, checkpoint, path)
    looks = _compare(found, taken, certain=any(_score(each, checkpoint.weights, checkpoint, path) for each in found))
    if looks:
        notes[LOOKS_LIKE] = looks
    return notes


@dataclass(frozen=True)
class _Preprocessing:
    """How images reach a model, in words."""

    normalization: str
    resizing: str

    @classmethod
    def of(cls, record: ModelRecord) -> _Preprocessing:
        size = record.input_size[0] if record.input_size else 0
        values = (record.mean, record.std)
        return cls(describe_normalization(*values), describe_resizing(record, size))


def _compare(found: list[Published], taken: _Preprocessing, *, certain: bool) -> str:
    """What differs between the published models that a file fits and how it was opened; '' if nothing does."""
    kinds: dict[str, list[Published]] = {}
    for each in found:
        kinds.setdefault(each.normalization, []).append(each)
    ways = {(each.normalization, each.resizing) for each in found}
    if not found or ways == {(taken.normalization, taken.resizing)}:
        return ""
    looks = "; or ".join(
        f"{_listed([each.spec for each in group])}, trained with {normalization}"
        for normalization, group in kinds.items()
    )
    evaluated = f", evaluated with {found[0].resizing}" if len({each.resizing for each in found}) == 1 else ""
    alone = "" if certain else " (by keys and shapes, which timm's own weights have, too)"
    mean, std = (",".join(f"{value:g}" for value in dict.fromkeys(way)) for way in (found[0].mean, found[0].std))
    flags = f"--mean {mean} --std {std}" if len(kinds) == 1 else "--mean and --std"
    if list(kinds) == [taken.normalization]:
        flags = f"--crop-pct {found[0].crop_pct:g}"
    model = found[0].spec if len(found) == 1 else "the one it is"
    # Strides of CIFAR's XCiT and eps of MIMIR's Swin are in no key or shape, and no flag of normalization sets them.
    hidden = any(each.small_images is not None or each.model.startswith("mimir_") for each in found)
    instead = "; it computes otherwise than timm's model, too" if hidden else f", or {flags}"
    return (
        f"this looks like {looks}{evaluated}{alone}. Here it has {taken.normalization}, {taken.resizing}. "
        f"Use {model} as MODEL{instead}."
    )
