"""What is evaluated: a model and its data, how they were opened, the restriction to a benchmark's classes, and
images that are not evaluated.

ImageNet-A and ImageNet-R have 200 of the 1000 classes. Published numbers (Hendrycks et al., arXiv:1907.07174 and
2006.16241) take the largest of these 200 logits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model, options_for_features
from vitadel.backbones.anatomy import family_of
from vitadel.backbones.checkpoints import zoo_names
from vitadel.backbones.classifier import Classifier, check_images_fit, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.timm_models import is_timm_name
from vitadel.classes import AMONG, ClassMapping
from vitadel.data import open_dataset
from vitadel.data.batches import BadSample, Preprocess, balanced_subset, check_labels, read_batches
from vitadel.data.spec import parse_spec, same_images, with_kind
from vitadel.errors import UserError
from vitadel.evaluation.engine.class_mapping import Classes, RelabeledSource, match_source
from vitadel.runtime.opening import Opening
from vitadel.types import Source


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
    mapping: ClassMapping | None = None  # from the data's classes to the model's outputs, where both have names
    among: str = "all"
    remarks: tuple[str, ...] = ()  # about objects that were not taken as they are

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
        preprocess = Preprocess(size, record.crop_pct, record.interpolation, record.crop_mode, record.mean)
        check_images_fit(self.model, size, self.model_spec)
        return preprocess

    @property
    def family(self) -> str:
        try:
            return family_of(self.model)
        except UserError:
            return "unknown"

    @property
    def restriction(self) -> str:
        """'10 of 1000 outputs' if the user restricted the model to some of its classes; else nothing."""
        if self.mapping is not None and self.among == "data" and len(self.mapping.outputs) < self.mapping.of:
            return f"{len(self.mapping.outputs)} of {self.mapping.of} outputs"
        kept, outputs, _ = self.model.record.notes.get("outputs", "").partition(" outputs")
        return kept + outputs

    @property
    def is_plain(self) -> bool:
        """Whether nothing is known or assumed that a clean accuracy should be compared with."""
        split = "" if self.given_as_object else self.data_spec.rpartition("@")[2]
        known = self.model.record.training is not None or self.mapping is not None
        return not (known or self.assumptions or split in ("train", "trainval"))

    @property
    def assumptions(self) -> list[str]:
        """What was taken for granted about model and data, because nothing states it."""
        mapping, record = self.mapping, self.model.record
        found = [] if mapping is None or not mapping.assumption else [mapping.assumption]
        if mapping is not None and "assumed" in mapping.origin:
            found.append(f"the model's classes are {mapping.origin}")
        if mapping is None and record.num_classes not in (None, len(self.source.classes)):
            found.append("labels of the data are numbers of the model's outputs")
        return [*record.assumptions.values(), *found, *normalization_doubts(record), *self.remarks]

    def selection(self, limit: int | None, seed: int, skip_bad: bool | None) -> tuple[Tensor, tuple[BadSample, ...]]:
        """The sorted indices of the samples to work on, and those left out because of their labels."""
        labels = self.source.labels()
        usable = torch.ones(len(labels), dtype=torch.bool)
        classes = self.model.record.num_classes or len(self.source.classes)
        mislabeled = check_labels(self.source, classes, skip_bad=skip_bad, fixed=not is_timm_name(self.model_spec))
        for bad in mislabeled:
            usable[bad.index] = False
        rows = usable.nonzero()[:, 0]
        return balanced_subset(labels[rows], limit, seed, rows), mislabeled

    def model_fingerprint(self) -> str:
        """Identifies weights and normalization, so that a run is not resumed with different ones."""
        digest = hashlib.sha256(self.model.record.without_names().to_json().encode())
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
    data: Any,
    *,
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
    for_features: bool = False,
    classes: Classes | None = None,
    among: str = "all",
    match: bool = True,
) -> Target:
    """Open what is given by name, with its robustness tokens if there are any, and take objects as they are.

    `data` is a spec, a path, tensors or arrays (x, y), a Dataset, a DataLoader, or a source. Its classes are matched
    with the model's outputs by their names (see `engine.class_mapping`), unless `match` is off
    or only features are used.
    """
    data = str(data) if isinstance(data, Path) else data
    if isinstance(model, str):
        _refuse_shapes_for_others(model, data)
        opened = open_model(model, model_options, tokens=tokens, allow_readable=allow_readable)
        classifier, model_spec = cast(Classifier, opened), model
        if not for_features:
            _refuse_embedding(classifier.record, model)
    else:
        # A model with a record takes pixels already, as a classifier with robustness tokens does.
        recorded = isinstance(getattr(model, "record", None), ModelRecord)
        classifier = cast(Classifier, model) if recorded else wrap(model)
        model_spec = classifier.record.name
    remarks: tuple[str, ...] = ()
    if isinstance(data, str):
        data = with_kind(data)
        source = open_dataset(data, root=data_root, skip_bad=skip_bad)
    else:
        source, remarks = _source_of(data)
    target = Target(
        classifier,
        model_spec,
        source,
        data if isinstance(data, str) else repr(source),
        data_root,
        given_as_object=not isinstance(data, str),
        remarks=remarks,
        opening=Opening.read(
            **(model_options or {}),
            model=model if isinstance(model, str) else None,
            data=data if isinstance(data, str) else None,
            data_root=data_root,
            tokens=tokens,
            allow_readable=allow_readable,
            skip_bad=skip_bad,
            class_file=classes if isinstance(classes, str | Path) else None,
            among=among,
        ),
    )
    if not match or for_features:
        return target
    return _matched(target, (model_options or {}).get("weights"), classes, among)


def _source_of(data: Any) -> tuple[Source, tuple[str, ...]]:
    from vitadel.data.sources.objects import shuffles, source_of  # names are far more usual

    shuffled = "the DataLoader shuffles; its dataset was read in its own order, so that indices are stable"
    return source_of(data), (shuffled,) if shuffles(data) else ()


def _matched(target: Target, weights: str | Path | None, classes: Classes | None, among: str) -> Target:
    """The target with labels that are numbers of the model's outputs."""
    if among not in AMONG:
        raise UserError(f"--among must be {' or '.join(AMONG)}, got {among!r}")
    record = target.model.record
    same = record.num_classes == len(target.source.classes)
    from_file = (weights is not None and str(weights) not in _NO_FILE) or Path(target.model_spec).exists()
    if same and record.classes is None and classes is None and not from_file:
        return target  # nothing is known of the model's classes but their number
    source, mapping = match_source(target.source, record, target.model_spec, weights, classes, among)
    return replace(target, source=source, mapping=mapping, among=among)


_NO_FILE = ("random", "pretrained")


def open_as(
    opening: Opening, model: nn.Module | None = None, data: Any = None, *, for_features: bool = False
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
        for_features=for_features,
        classes=opening.class_file,
        among=opening.among,
    )
    return replace(target, opening=opening)


def _refuse_embedding(record: ModelRecord, spec: str) -> None:
    """An image tower without classes has no accuracy."""
    if "output" in record.notes and record.can_be_rebuilt:
        raise UserError(
            f"'{spec}' gives an image embedding of {record.num_classes} numbers, not class scores, so it cannot be "
            "evaluated alone. Train a head on its features with `vitadel probe`, or use it where features are enough."
        )


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


def normalization_doubts(record: ModelRecord) -> tuple[str, ...]:
    """What speaks against the normalization of a model that was given as an object."""
    if "normalisation" in record.notes:  # of a timm module
        call = "give vitadel.wrap(model, mean=..., std=...) with them if it was trained so"
        how = f"by mean={record.mean}, std={record.std}" if record.normalizes else "as they are"
        return (f"pixels reach the model {how}, but {record.notes['normalisation']}: {call}",)
    return (record.notes["normalization"],) if "normalization" in record.notes else ()


AMONG_DATA = "by --among data"


class SubsetLogits(nn.Module):
    """A classifier restricted to some of its classes, renumbered in their order."""

    chosen: Tensor

    def __init__(
        self, classifier: Classifier, chosen: Sequence[int], of: int, why: str = "as in published results"
    ) -> None:
        super().__init__()
        self.why = why
        self.classifier = classifier
        self.of = of
        self.register_buffer("chosen", torch.tensor(chosen, dtype=torch.int64), persistent=False)
        self.training = classifier.training
        _check_outputs(classifier.record.num_classes, of, len(chosen), classifier.record.name)

    @property
    def record(self) -> ModelRecord:
        """The classifier's record, with the number of classes that are left."""
        record, count = self.classifier.record, len(self.chosen)
        note = f"the largest of {count} of its {self.of} logits counts, {self.why}"
        return replace(record, num_classes=count, notes=record.notes | {"classes": note})

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x)
        _check_outputs(logits.shape[1], self.of, len(self.chosen), self.classifier.record.name)
        return logits[:, self.chosen]


def apply_class_subset(target: Target) -> Target:
    """Model and data restricted to the benchmark's classes; unchanged if it has all classes of the model."""
    among = getattr(target.source, "among", None)
    if among is None:
        return target
    source = RelabeledSource.restricted(target.source, among)
    strange = (source.labels() < 0).nonzero()[:, 0].tolist()
    if strange:
        raise UserError(
            f"{source.name(strange[0])} is not of one of the {len(among)} classes of {target.data_spec} (nor are "
            f"{len(strange) - 1} others); use the benchmark's own files, or imagenet:DIR for all classes"
        )
    reason = () if target.mapping is None or target.among == "all" else (AMONG_DATA,)
    model = SubsetLogits(target.model, among, len(target.source.classes), *reason)
    return replace(target, model=cast(Classifier, model), source=source)


def subset_like(chosen: nn.Module, model: nn.Module) -> nn.Module:
    """`model` restricted to the same classes as `chosen`; unchanged if that is not restricted."""
    if not isinstance(chosen, SubsetLogits):
        return model
    return SubsetLogits(cast(Classifier, model), chosen.chosen.tolist(), chosen.of, chosen.why).to(chosen.chosen.device)


def relabel_like(other: Source, source: Source) -> Source:
    """`other` with its labels renumbered as in `source`, if it has all classes that `source` was relabeled from."""
    if not isinstance(source, RelabeledSource):
        return other
    other, before = relabel_like(other, source.source), source.source.classes
    fits = len(other.classes) == len(before) if source.mapping is None else list(other.classes) == list(before)
    return replace(source, source=other) if fits else other


CALIBRATION_BATCH = 64
"""Images per calibration batch: fixed, so that the result does not depend on the batch size of the run."""


@dataclass(frozen=True)
class CalibrationImages:
    """Batches (pixels, labels) that can be iterated repeatedly and are not kept in memory."""

    source: Source
    indices: Tensor
    preprocess: Preprocess
    device: torch.device
    skip_bad: bool | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = [part.tolist() for part in self.indices.split(CALIBRATION_BATCH)]
        for batch in read_batches(self.source, chunks, self.preprocess, skip_bad=self.skip_bad, device=self.device):
            if len(batch.y):
                yield batch.x, batch.y


def calibration_images(
    target: Target, evaluated: Tensor, spec: str | None, wanted: int, seed: int, flag: str = "--calibration"
) -> tuple[Source, Tensor]:
    """Images from `spec` (the value of `flag`), or the training split of the data, or what the selection leaves out."""
    source = _training_split(target) if spec is None else open_dataset(spec, root=target.data_root, skip_bad=True)
    if spec is not None and _is_evaluated(target, spec):
        raise UserError(
            f"{flag} {spec} are the evaluated images, and an attack must not be calibrated on them. Give other data, "
            "or leave the flag out: then the training split is used, or what --limit leaves out."
        )
    leftover = source is None
    source = target.source if source is None else relabel_like(source, target.source)
    labels = source.labels()
    classes = target.model.record.num_classes or len(target.source.classes)
    usable = (labels >= 0) & (labels < classes)
    if leftover:
        usable[evaluated] = False
    rows = usable.nonzero()[:, 0]
    if len(rows) == 0 and not leftover:
        raise UserError(f"no image of the calibration data has one of the model's {classes} classes; give other data")
    if len(rows) == 0:
        raise UserError(
            f"this attack needs calibration images that are not evaluated, and {target.data_spec} has no training "
            f"split and no image left. Give some with {flag} SPEC, or leave some out with --limit."
        )
    return source, balanced_subset(labels[rows], min(wanted, len(rows)), seed, rows)


def _is_evaluated(target: Target, spec: str) -> bool:
    if target.given_as_object:
        return False
    root = Path("data" if target.data_root is None else target.data_root)
    specs = (spec, target.data_spec)
    return same_images(*(parse_spec(each, root=root, split=None) for each in specs))


def _training_split(target: Target) -> Source | None:
    """The training split of the data; None if they are not given by name, are that split already, or have none."""
    spec = target.data_spec
    head, _, split = spec.rpartition("@")
    name = head if split in ("test", "val") and head else spec
    if split == "train" or target.given_as_object or Path(spec).exists():
        return None
    try:
        return open_dataset(f"{name}@train", root=target.data_root, skip_bad=True)
    except UserError:
        return None


def _check_outputs(outputs: int | None, of: int, chosen: int, name: str) -> None:
    if outputs is not None and outputs != of:
        raise UserError(
            f"'{name}' has {outputs} outputs, but this benchmark takes {chosen} of the {of} classes of ImageNet-1k: "
            f"use a model with all {of}, or folder:DIR for one that was trained on these {chosen} alone"
        )
