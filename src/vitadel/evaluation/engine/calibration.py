"""Calibration of attacks that study a model first: on training or held-out images, never on the evaluated ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vitadel.data import open_dataset
from vitadel.data.batches import read_batches
from vitadel.data.overlap import same_images
from vitadel.data.preprocess import Preprocess
from vitadel.data.spec import parse_spec
from vitadel.data.subset import balanced_subset
from vitadel.errors import UserError
from vitadel.evaluation.engine.class_subset import relabel_like
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target
from vitadel.types import Attack, Calibrated, Source

__all__ = ["BATCH", "CalibrationImages", "calibrate", "calibration_images", "needs_calibration"]

BATCH = 64
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
        chunks = [part.tolist() for part in self.indices.split(BATCH)]
        for batch in read_batches(self.source, chunks, self.preprocess, skip_bad=self.skip_bad):
            if len(batch.y):
                batch = batch.to(self.device)
                yield batch.x, batch.y


def needs_calibration(attack: Attack) -> bool:
    """Whether the attack, or one that it wraps, must be calibrated before it can run."""
    inner = getattr(attack, "attack", None)
    return isinstance(attack, Calibrated) or (inner is not None and needs_calibration(inner))


def calibrate(attack: Attack, context: RunContext, target: Target, evaluated: Tensor, spec: str | None) -> Attack:
    """Prepare the attack, and those that it wraps, where they need it: in the main process, for all processes."""
    inner = getattr(attack, "attack", None)
    if inner is not None:
        ready = calibrate(inner, context, target, evaluated, spec)
        attack = attack if ready is inner else replace(attack, attack=ready)  # type: ignore[type-var]
    return _prepared(attack, context, target, evaluated, spec) if isinstance(attack, Calibrated) else attack


def _prepared(attack: Calibrated, context: RunContext, target: Target, evaluated: Tensor, spec: str | None) -> Attack:
    def prepare() -> Attack:
        source, indices = calibration_images(target, evaluated, spec, attack.calibration_images, context.seed)
        images = CalibrationImages(source, indices, context.preprocess, context.processes.device, context.skip_bad)
        return attack.prepared(context.model, images, context.seed)

    return context.processes.on_main(prepare)


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
