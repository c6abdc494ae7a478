"""Preparation of attacks: a preflight that finds misfits before a long run, and calibration on images that are not
evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import numbered_targets
from vitadel.attacks.wrappers import WorstOf
from vitadel.data import open_dataset
from vitadel.data.batches import read_batches
from vitadel.data.preprocess import Preprocess
from vitadel.data.selection import balanced_subset
from vitadel.data.spec import parse_spec, same_images
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target, relabel_like
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated, Source

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


_FORWARDS = 3
"""After so many forward passes an attack has used everything that it needs of a model."""


class _Enough(Exception):
    """Ends an attack that has started without an error."""


def preflight(model: nn.Module, attacks: Sequence[tuple[str, Attack]], shape: tuple[int, int]) -> None:
    """Run the first passes of each attack on a synthetic image, to raise now the `UserError` that it ends with."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    x = torch.linspace(0.2, 0.8, 3 * shape[0] * shape[1], device=device).view(1, 3, *shape)
    with frozen(model):
        with torch.no_grad():
            likely = model(x)[0].argsort(descending=True).tolist()
        for name, attack in attacks:
            # The predicted class, so that the image is not misclassified at once; but not a target of the attack.
            label = next((each for each in likely if each not in numbered_targets(name)), likely[0])
            for step in _first_steps(attack, model, x, torch.tensor([label], device=device)):
                _stop_early(model, step)


def _first_steps(attack: Attack, model: nn.Module, x: Tensor, y: Tensor) -> Iterator[Callable[[], object]]:
    """The first steps of an attack: of each member of an ensemble, of the calibration, and of what it wraps."""
    if isinstance(attack, WorstOf):
        for _, member in attack.members():
            yield from _first_steps(member, model, x, y)
    elif not needs_calibration(attack):
        yield partial(attack, model, x, y, SampleRNG.of_samples(0, [0], x.device))
    else:
        if isinstance(attack, Calibrated):
            yield partial(attack.prepared, model, [(x, y)], 0)
        if (inner := getattr(attack, "attack", None)) is not None:
            yield from _first_steps(inner, model, x, y)


def _stop_early(model: nn.Module, work: Callable[[], object]) -> None:
    passed = 0

    def count(module: nn.Module, given: object) -> None:
        nonlocal passed
        passed += 1
        if passed > _FORWARDS:
            raise _Enough

    watch = model.register_forward_pre_hook(count)
    try:
        work()
    except _Enough:
        return
    finally:
        watch.remove()
