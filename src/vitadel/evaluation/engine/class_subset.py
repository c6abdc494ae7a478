"""Benchmarks on a subset of a model's classes: ImageNet-A and ImageNet-R, with 200 of the 1000.

Published numbers (Hendrycks et al., arXiv:1907.07174 and 2006.16241) take the largest of the 200 logits. The largest of
all 1000 gives a lower accuracy on the same images; it is a result field of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from PIL.Image import Image
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.record import ModelRecord
from vitadel.data.validation import skipped
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import RunContext, clean_stage
from vitadel.evaluation.engine.target import Target
from vitadel.statistics import share
from vitadel.types import Source

__all__ = ["SubsetLogits", "SubsetSource", "accuracy_among_all", "apply_class_subset", "relabel_like", "subset_like"]


class SubsetLogits(nn.Module):
    """A classifier restricted to some of its classes, renumbered in their order."""

    chosen: Tensor

    def __init__(self, classifier: Classifier, chosen: Sequence[int], of: int) -> None:
        super().__init__()
        self.classifier = classifier
        self.of = of
        self.register_buffer("chosen", torch.tensor(chosen, dtype=torch.int64), persistent=False)
        self.training = classifier.training
        _check_outputs(classifier.record.num_classes, of, len(chosen), classifier.record.name)

    @property
    def record(self) -> ModelRecord:
        """The classifier's record, with the number of classes that are left."""
        record, count = self.classifier.record, len(self.chosen)
        note = f"the largest of {count} of its {self.of} logits counts, as in published results"
        return replace(record, num_classes=count, notes=record.notes | {"classes": note})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x)
        _check_outputs(logits.shape[1], self.of, len(self.chosen), self.classifier.record.name)
        return logits[:, self.chosen]


@dataclass(frozen=True, eq=False)
class SubsetSource:
    """A source with its labels renumbered as by `SubsetLogits`; -1 for classes that are not `chosen`."""

    source: Source
    chosen: tuple[int, ...] = field(repr=False)

    @property
    def classes(self) -> Sequence[str]:
        return [self.source.classes[number] for number in self.chosen]

    @property
    def skipped(self) -> tuple[str, ...]:
        return skipped(self.source)

    @cached_property
    def _labels(self) -> Tensor:
        place = torch.full((len(self.source.classes),), -1)
        place[list(self.chosen)] = torch.arange(len(self.chosen))
        labels = self.source.labels()
        return torch.where(labels < 0, labels, place[labels.clamp(min=0)])

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> Tensor:
        return self._labels

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        return self.source.read(indices)

    def name(self, index: int) -> str:
        return self.source.name(index)


def apply_class_subset(target: Target) -> Target:
    """Model and data restricted to the benchmark's classes; unchanged if it has all classes of the model."""
    among = getattr(target.source, "among", None)
    if among is None:
        return target
    source = SubsetSource(target.source, tuple(among))
    strange = (source.labels() < 0).nonzero()[:, 0].tolist()
    if strange:
        raise UserError(
            f"{source.name(strange[0])} is not of one of the {len(among)} classes of {target.data_spec} (nor are "
            f"{len(strange) - 1} others); use the benchmark's own files, or imagenet:DIR for all classes"
        )
    model = SubsetLogits(target.model, among, len(target.source.classes))
    return replace(target, model=cast(Classifier, model), source=source)


def subset_like(chosen: nn.Module, model: nn.Module) -> nn.Module:
    """`model` restricted to the same classes as `chosen`; unchanged if that is not restricted."""
    if not isinstance(chosen, SubsetLogits):
        return model
    return SubsetLogits(cast(Classifier, model), chosen.chosen.tolist(), chosen.of).to(chosen.chosen.device)


def relabel_like(other: Source, source: Source) -> Source:
    """`other` with its labels renumbered as in `source`, if it has all classes that `source` was restricted from."""
    if not isinstance(source, SubsetSource) or len(other.classes) != len(source.source.classes):
        return other
    return SubsetSource(other, source.chosen)


def accuracy_among_all(context: RunContext, indices: Tensor) -> dict[str, Any]:
    """The field `clean_among_all`: accuracy on the same images among all classes; empty if the model has them all."""
    model, source = context.model, context.source
    if not isinstance(model, SubsetLogits) or not isinstance(source, SubsetSource):
        return {}
    whole = replace(context, model=model.classifier, source=source.source, classes=model.of)
    records = clean_stage(whole, indices, f"clean among all {model.of}")
    right = sum(int((record["prediction"] == record["label"]).sum()) for record in records)
    n = sum(len(record["label"]) for record in records)
    remark = f"the largest of all {model.of} logits; not comparable with published numbers of this benchmark"
    return {"clean_among_all": {**share(right, n, "correct", "accuracy"), "classes": model.of, "remark": remark}}


def _check_outputs(outputs: int | None, of: int, chosen: int, name: str) -> None:
    if outputs is not None and outputs != of:
        raise UserError(
            f"'{name}' has {outputs} outputs, but this benchmark takes {chosen} of the {of} classes of ImageNet-1k: "
            f"use a model with all {of}, or folder:DIR for one that was trained on these {chosen} alone"
        )
