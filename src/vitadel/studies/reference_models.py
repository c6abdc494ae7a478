"""Other models that are shown the same pictures: opened by name, and only if their answers can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from vitadel.adapters.adapted_model import open_model
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import zoo_names
from vitadel.backbones.model_checks import check_images_fit
from vitadel.errors import UserError
from vitadel.evaluation.engine.class_subset import apply_class_subset, subset_like
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.hooks import frozen

__all__ = ["ReferenceModel", "at_work", "named_alike", "seated"]


@dataclass(frozen=True, eq=False)
class ReferenceModel:
    """A model that answers; `itself` is the studied one, whose answers to its own pictures prove little."""

    name: str
    target: Target
    itself: bool = False

    @torch.no_grad()
    def answers(self, x: Tensor) -> Tensor:
        logits: Tensor = self.target.model(x)
        return logits

    def told(self) -> dict[str, Any]:
        """Who this is, for results."""
        return {"name": self.name, "itself": self.itself, "fingerprint": self.target.model_fingerprint()}


def seated(target: Target, others: Sequence[str]) -> list[ReferenceModel]:
    """The studied model and then the others: by default those of the zoo that were trained on
    its data, which may be none.

    An other is a MODEL, or MODEL=WEIGHTS where its name alone does not say which.
    """
    studied = apply_class_subset(target)
    jury = [ReferenceModel(studied.model_spec, studied, itself=True)]
    kind = studied.data_spec.partition(":")[0].partition("@")[0]  # classes of other data mean other things
    alike = [name for name in zoo_names() if name.startswith(f"zoo:{kind}-") and name != studied.model_spec]
    for spec in others or alike:
        try:
            jury.append(ReferenceModel(spec, _fitting(studied, spec)))
        except UserError:
            if others:
                raise
    names = [juror.name for juror in jury]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--others names {twice[0]!r} twice, or the studied model once more; each may stand once")
    return jury


def _fitting(studied: Target, spec: str) -> Target:
    name, _, weights = spec.partition("=")
    opened = open_model(name, {"weights": weights}) if weights else open_model(name)
    model = subset_like(studied.model, opened)
    other = replace(studied, model=cast(Classifier, model), model_spec=spec)
    mine = studied.model.record.num_classes or len(studied.source.classes)
    theirs = other.model.record.num_classes
    if theirs is not None and mine != theirs:
        raise UserError(
            f"'{spec}' has {theirs} classes and '{studied.model_spec}' {mine}, so that answers of the one say nothing "
            "about the other. Give models for the same classes with --others."
        )
    check_images_fit(other.model, studied.preprocess.shape, spec)
    return other


def named_alike(jury: Sequence[ReferenceModel]) -> str:
    """What the others are, in one word, so that a study is not resumed with others of the same name."""
    words = " ".join(juror.target.model_fingerprint() for juror in jury if not juror.itself)
    return hashlib.sha256(words.encode()).hexdigest()[:16]


@contextmanager
def at_work(jury: Sequence[ReferenceModel], device: torch.device) -> Iterator[None]:
    """All of them on the device, in eval mode and without gradients to their weights."""
    with ExitStack() as undo:
        for juror in jury:
            undo.enter_context(frozen(juror.target.model.to(device)))
        yield
