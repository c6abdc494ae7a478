"""What is evaluated: a model and its data, and how they were opened."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model, options_for_features
from vitadel.backbones.anatomy import family_of
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.load import zoo_names
from vitadel.backbones.model_checks import check_images_fit
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.timm_models import is_timm_name
from vitadel.data import open_dataset
from vitadel.data.preprocess import Preprocess
from vitadel.data.subset import balanced_subset
from vitadel.data.validation import BadSample, check_labels
from vitadel.errors import UserError
from vitadel.runtime.opening import Opening
from vitadel.types import Source

__all__ = ["Target", "open_target", "sample_fingerprint"]


@dataclass(frozen=True)
class Target:
    """A model and the data it is evaluated on, with the names they were given by."""

    model: Classifier
    model_spec: str
    source: Source
    data_spec: str
    data_root: str | Path | None = None
    given_as_object: bool = False  # the data set; then `data_spec` is no name to open anything by
    opening: Opening | None = None

    @cached_property
    def preprocess(self) -> Preprocess:
        """The model's own preprocessing; a model without an input size gets that of the first readable image."""
        record = self.model.record
        size = record.input_size
        if size is None:
            images = (self.source.read([index])[0] for index in range(len(self.source)))
            first = next((image for image in images if not isinstance(image, Exception)), None)
            if first is None:
                raise UserError(f"no image of {self.data_spec} can be read, and the model names no input size")
            size = (first.height, first.width)
        check_images_fit(self.model, size, self.model_spec)
        return Preprocess(size, record.crop_pct, record.interpolation, record.crop_mode, record.mean)

    @property
    def family(self) -> str:
        try:
            return family_of(self.model)
        except UserError:
            return "unknown"

    def selection(self, limit: int | None, seed: int, skip_bad: bool | None) -> tuple[Tensor, tuple[BadSample, ...]]:
        """The sorted indices of the samples to work on, and those left out because of their labels."""
        labels = self.source.labels()
        usable = torch.ones(len(labels), dtype=torch.bool)
        classes = self.model.record.num_classes or len(self.source.classes)
        mislabelled = check_labels(self.source, classes, skip_bad=skip_bad, fixed=not is_timm_name(self.model_spec))
        for bad in mislabelled:
            usable[bad.index] = False
        rows = usable.nonzero()[:, 0]
        return balanced_subset(labels[rows], limit, seed, rows), mislabelled

    def model_fingerprint(self) -> str:
        """Identifies weights and normalization, so that a run is not resumed with different ones. The description of
        the recipe is not part of it."""
        record = self.model.record
        notes = {key: note for key, note in record.notes.items() if key != "about"}
        digest = hashlib.sha256(replace(record, notes=notes).to_json().encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def data_fingerprint(self, indices: Tensor) -> str:
        return sample_fingerprint(indices, self.source.labels())


def sample_fingerprint(indices: Tensor, labels: Tensor) -> str:
    """Identifies samples by index and label."""
    return hashlib.sha256(torch.stack([indices, labels[indices]]).numpy().tobytes()).hexdigest()[:16]


def open_target(
    model: str | nn.Module,
    data: str | Source,
    *,
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
) -> Target:
    """Open what is given by name, with its robustness tokens if there are any, and take objects as they are."""
    if isinstance(model, str):
        _refuse_shapes_for_others(model, data)
        opened = open_model(model, model_options, tokens=tokens, allow_readable=allow_readable)
        classifier, model_spec = cast(Classifier, opened), model
    else:
        # A model with a record takes pixels already, as a classifier with robustness tokens does.
        recorded = isinstance(getattr(model, "record", None), ModelRecord)
        classifier = cast(Classifier, model) if recorded else wrap(model)
        model_spec = classifier.record.name
    return Target(
        classifier,
        model_spec,
        open_dataset(data, root=data_root, skip_bad=skip_bad) if isinstance(data, str) else data,
        data if isinstance(data, str) else repr(data),
        data_root,
        given_as_object=not isinstance(data, str),
        opening=Opening.read(
            **(model_options or {}),
            model=model if isinstance(model, str) else None,
            data=data if isinstance(data, str) else None,
            data_root=data_root,
            tokens=tokens,
            allow_readable=allow_readable,
            skip_bad=skip_bad,
        ),
    )


def open_as(
    opening: Opening, model: nn.Module | None = None, data: Source | None = None, *, for_features: bool = False
) -> Target:
    """Open model and data as recorded, or take objects instead of names; `for_features` needs no head."""
    options, spec = opening.model_options(), opening.model
    if for_features and spec is not None:
        options = options_for_features(spec, options)
    target = open_target(
        cast(str, spec) if model is None else model,
        cast(str, opening.data) if data is None else data,
        data_root=opening.data_root,
        model_options=options,
        skip_bad=opening.skip_bad,
        tokens=opening.tokens,
        allow_readable=opening.allow_readable,
    )
    return replace(target, opening=opening)


def _refuse_shapes_for_others(model: str, data: str | Source) -> None:
    """The built-in images are the default of --data: a zoo model trained on other images is not judged on them."""
    place, _, name = model.partition(":")
    trained_on = name.partition("-")[0]
    shapes = isinstance(data, str) and re.match(r"shapes\b", data) is not None
    if place == "zoo" and trained_on != "shapes" and shapes and model in zoo_names():
        raise UserError(
            f"{model} was trained on {trained_on}; shapes, the built-in images, are the default of --data and mean "
            f"nothing to it. Give --data {trained_on}@test with --data-root DIR, or --data parquet:FILE."
        )
