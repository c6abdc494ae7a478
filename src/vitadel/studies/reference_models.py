"""Reference models: other models that classify the same images, opened by name if their classes can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.checkpoints import zoo_names
from vitadel.backbones.classifier import Classifier, check_images_fit
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import Target, apply_class_subset, subset_like
from vitadel.instrument.hooks import frozen


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """A model that classifies; `itself` is the studied one, whose predictions on its own images prove little."""

    name: str
    target: Target
    itself: bool = False

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.target.model(x)
        return logits

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "itself": self.itself, "fingerprint": self.target.model_fingerprint()}


def open_reference_models(target: Target, others: Sequence[str]) -> list[ReferenceModel]:
    """The studied model and then the others, by default those of the zoo for its data, which may be none.

    An other is a MODEL, or MODEL=WEIGHTS if it needs a weights file.
    """
    studied = apply_class_subset(target)
    models = [ReferenceModel(studied.model_spec, studied, itself=True)]
    dataset = studied.data_spec.partition(":")[0].partition("@")[0]  # classes of other data mean other things
    zoo = [name for name in zoo_names() if name.startswith(f"zoo:{dataset}-") and name != studied.model_spec]
    for spec in others or zoo:
        try:
            models.append(ReferenceModel(spec, _open_comparable(studied, spec)))
        except UserError:
            if others:
                raise
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--others has {twice[0]!r} twice, or names the studied model; name each model once")
    return models


def _open_comparable(studied: Target, spec: str) -> Target:
    name, _, weights = spec.partition("=")
    opened = open_model(name, {"weights": weights}) if weights else open_model(name)
    other = replace(studied, model=cast(Classifier, subset_like(studied.model, opened)), model_spec=spec)
    mine = studied.model.record.num_classes or len(studied.source.classes)
    theirs = other.model.record.num_classes
    if theirs is not None and mine != theirs:
        raise UserError(
            f"'{spec}' has {theirs} classes and '{studied.model_spec}' {mine}, so predictions cannot be compared. "
            "Give models for the same classes with --others."
        )
    check_images_fit(other.model, studied.preprocess.shape, spec)
    return other


def fingerprint_others(models: Sequence[ReferenceModel]) -> str:
    """A fingerprint of the others, so that a study is not resumed with others of the same name."""
    words = " ".join(model.target.model_fingerprint() for model in models if not model.itself)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


@contextmanager
def on_device(models: Sequence[ReferenceModel], device: torch.device) -> Iterator[None]:
    """Move all models to the device, in eval mode and without gradients of their weights."""
    with ExitStack() as undo:
        for model in models:
            undo.enter_context(frozen(model.target.model.to(device)))
        yield
