"""Images for attacks that study a model before they attack it: training or held-out ones, never the audited ones."""

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
from vitadel.evaluation.engine.class_subset import numbered_alike
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target
from vitadel.types import Attack, Calibrated, Source

__all__ = ["BATCH", "CalibrationImages", "calibrated", "calibration_images", "studies"]

BATCH = 64
"""Images per calibration batch: fixed, so that what is found does not depend on the audit's batch size."""


@dataclass(frozen=True)
class CalibrationImages:
    """Batches (pixels, labels) that can be gone through repeatedly without being held in memory."""

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


def studies(attack: Attack) -> bool:
    """Whether the attack, or one that it wraps, needs images to study before it can run."""
    inner = getattr(attack, "attack", None)
    return isinstance(attack, Calibrated) or (inner is not None and studies(inner))


def calibrated(attack: Attack, context: RunContext, target: Target, audited: Tensor, spec: str | None) -> Attack:
    """The attack, where it or one that it wraps must be prepared: by the main process for all of them."""
    inner = getattr(attack, "attack", None)
    if inner is not None:
        ready = calibrated(inner, context, target, audited, spec)
        attack = attack if ready is inner else replace(attack, attack=ready)  # type: ignore[type-var]
    return _prepared(attack, context, target, audited, spec) if isinstance(attack, Calibrated) else attack


def _prepared(attack: Calibrated, context: RunContext, target: Target, audited: Tensor, spec: str | None) -> Attack:
    def prepare() -> Attack:
        source, indices = calibration_images(target, audited, spec, attack.calibration_images, context.seed)
        images = CalibrationImages(source, indices, context.preprocess, context.processes.device, context.skip_bad)
        return attack.prepared(context.model, images, context.seed)

    return context.processes.on_main(prepare)


def calibration_images(
    target: Target, audited: Tensor, spec: str | None, wanted: int, seed: int, flag: str = "--calibration"
) -> tuple[Source, Tensor]:
    """From `spec`, which `flag` gives, else from the training split of the audited data, else from what is left out."""
    source = _training_split(target) if spec is None else open_dataset(spec, root=target.data_root, skip_bad=True)
    if spec is not None and _is_audited(target, spec):
        raise UserError(
            f"{flag} {spec} are the audited images, and an attack that has studied them proves nothing. Give others, "
            "or leave the flag out: then the training split is taken, or what --limit leaves over."
        )
    left_over = source is None
    source = target.source if source is None else numbered_alike(source, target.source)
    labels = source.labels()
    classes = target.model.record.num_classes or len(target.source.classes)
    usable = (labels >= 0) & (labels < classes)
    if left_over:
        usable[audited] = False
    rows = usable.nonzero()[:, 0]
    if len(rows) == 0 and not left_over:
        raise UserError(f"no image of the calibration data has one of the model's {classes} classes; give other data")
    if len(rows) == 0:
        raise UserError(
            f"this attack needs calibration images that are not audited, and {target.data_spec} has no training split "
            f"and no image left over. Give some with {flag} SPEC, or leave some out with --limit."
        )
    return source, balanced_subset(labels[rows], min(wanted, len(rows)), seed, rows)


def _is_audited(target: Target, spec: str) -> bool:
    if target.given_as_object:
        return False
    root = Path("data" if target.data_root is None else target.data_root)
    specs = (spec, target.data_spec)
    return same_images(*(parse_spec(each, root=root, split=None) for each in specs))


def _training_split(target: Target) -> Source | None:
    """None if the data is not given by name, is a split already, or has no split to train on."""
    spec = target.data_spec
    head, _, split = spec.rpartition("@")
    name = head if split in ("test", "val") and head else spec
    if split == "train" or target.given_as_object or Path(spec).exists():
        return None
    try:
        return open_dataset(f"{name}@train", root=target.data_root, skip_bad=True)
    except UserError:
        return None
