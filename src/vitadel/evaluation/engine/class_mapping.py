"""Other labels for a source: numbers of the model's outputs by a class mapping, or of the classes that count."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from PIL.Image import Image
from torch import Tensor

from vitadel.backbones.class_names import class_file_beside, lemmas_of
from vitadel.backbones.record import ModelRecord
from vitadel.classes import ClassMapping, ClassNames, mapping_from, match_classes, read_class_list
from vitadel.data.batches import skipped
from vitadel.errors import UserError
from vitadel.runtime.safe_reading import MOST_TEXT, check_regular_file
from vitadel.types import Source

Classes = str | Path | Sequence[str] | Mapping[str, int | str]
"""Names of a model's outputs, or an output for each class of the data; or the file that holds them."""


@dataclass(frozen=True, eq=False)
class RelabeledSource:
    """A source with other labels: class k of `source` becomes `numbers[k]` among `classes`; -1 for none.

    `mapping` is the one by which labels became numbers of the model's outputs, if they did; `among` are the outputs
    that the model is judged among, if not all.
    """

    source: Source
    classes: Sequence[str]
    numbers: tuple[int, ...] = field(repr=False)
    mapping: ClassMapping | None = None
    among: tuple[int, ...] | None = field(default=None, repr=False)

    @classmethod
    def mapped(cls, source: Source, mapping: ClassMapping, among: tuple[int, ...] | None) -> RelabeledSource:
        """With numbers of the model's outputs as labels; the data's classes keep the names that the data has."""
        named = list(mapping.names) or list(map(str, range(mapping.of)))
        for name, output in zip(mapping.data, mapping.outputs, strict=True):
            named[output] = name
        return cls(source, named, tuple(mapping.outputs), mapping, among)

    @classmethod
    def restricted(cls, source: Source, chosen: Sequence[int]) -> RelabeledSource:
        """With the chosen classes alone, in their order."""
        place = {number: position for position, number in enumerate(chosen)}
        numbers = tuple(place.get(number, -1) for number in range(len(source.classes)))
        return cls(source, [source.classes[number] for number in chosen], numbers)

    @property
    def skipped(self) -> tuple[str, ...]:
        return skipped(self.source)

    @cached_property
    def _labels(self) -> Tensor:
        labels, numbers = self.source.labels(), torch.tensor(self.numbers)
        known = (labels >= 0) & (labels < len(numbers))
        return torch.where(known, numbers[labels.clamp(0, len(numbers) - 1)], -1)

    def __len__(self) -> int:
        return len(self.source)

    def labels(self) -> Tensor:
        return self._labels

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        return self.source.read(indices)

    def read_exactly(self, indices: Sequence[int], shape: tuple[int, int]) -> list[Tensor | Exception] | None:
        exactly = getattr(self.source, "read_exactly", None)
        return None if exactly is None else cast("list[Tensor | Exception] | None", exactly(indices, shape))

    def name(self, index: int) -> str:
        return self.source.name(index)


def match_source(
    source: Source,
    record: ModelRecord,
    spec: str,
    weights: str | Path | None = None,
    classes: Classes | None = None,
    among: str = "all",
) -> tuple[Source, ClassMapping | None]:
    """The source with labels that are numbers of the model's outputs, and the mapping by which they are.

    `classes` names the outputs where they are not known otherwise.
    """
    outputs = record.num_classes or (None if record.classes is None else len(record.classes))
    model, pairs = _names_of_outputs(record, spec, weights, classes)
    if pairs is not None:
        if outputs is None:
            raise UserError("a class mapping needs a model with a known number of outputs: give --num-classes N")
        mapping: ClassMapping | None = mapping_from(pairs, list(source.classes), outputs, model)
    else:
        mapping = match_classes(list(source.classes), model, outputs, lemmas_of)
    # Sources of benchmarks state themselves which outputs count; their labels are output numbers.
    if mapping is None or not mapping.changes_labels or getattr(source, "among", None) is not None:
        return source, mapping
    chosen = tuple(sorted(mapping.outputs)) if among == "data" and len(mapping.outputs) > 1 else None
    return RelabeledSource.mapped(source, mapping, chosen), mapping


def _names_of_outputs(
    record: ModelRecord, spec: str, weights: str | Path | None, classes: Classes | None
) -> tuple[ClassNames | None, Mapping[str, int | str] | None]:
    known = None
    if record.classes is not None:
        known = ClassNames(record.classes, record.classes_from or "the record of its weights")
    origin = "--classes" if classes is not None else ""
    if (classes is None and record.classes_from is not None) or (classes is None and record.classes is None):
        beside = class_file_beside(spec, weights)  # says more than a guess from the number of outputs
        classes, origin = (beside, str(beside)) if beside is not None and _fits(beside, record) else (None, "")
    if classes is None:
        return known, None
    if isinstance(classes, str | Path):
        origin = origin if origin != "--classes" else f"--classes {classes}"
        path = Path(os.path.expanduser(classes))
        check_regular_file(path, "the file of class names", MOST_TEXT)
        listed: Sequence[str] | Mapping[str, int | str] = read_class_list(path)
    else:
        listed = classes
    if isinstance(listed, Mapping):
        return known, listed
    return ClassNames(tuple(map(str, listed)), origin), None


def _fits(file: Path, record: ModelRecord) -> bool:
    """Whether a file that no flag named has a name for every output; it may belong to another model."""
    listed = read_class_list(file)
    return not isinstance(listed, Mapping) and len(listed) == record.num_classes
