"""Preparation of attacks: a preflight that finds misfits before a long run, and calibration on other images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import numbered_targets
from vitadel.data.batches import read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import CALIBRATION_BATCH, CalibrationImages, Target, calibration_images
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Calibrated, Ensemble, Source


def needs_calibration(attack: Attack) -> bool:
    """Whether the attack, or one that it wraps, must be calibrated before it can run."""
    return any(True for _ in _calibrated_parts(attack))


def check_calibration(
    attacks: Sequence[Attack], target: Target, evaluated: Tensor, spec: str | None, seed: int
) -> None:
    """Refuse calibration data that cannot be used, also copies of evaluated images under another name.

    Pixels are compared only if the data were named: it takes one more reading of all evaluated images.
    """
    used, given = set[bytes](), set[bytes]()
    for count in {part.calibration_images for attack in attacks for part in _calibrated_parts(attack)}:
        source, rows = calibration_images(target, evaluated, spec, count, seed)
        if spec is not None:
            used |= _pixel_digests(target, source, rows)
    if used:
        given = _pixel_digests(target, target.source, evaluated)
    if used & given:
        raise UserError(
            f"--calibration {spec}: {len(used & given)} of the {len(used)} images that would be used are among the "
            "evaluated ones, and an attack must not be calibrated on those. Give other images, or leave the flag out: "
            "then the training split is used, or what --limit leaves out."
        )


def _calibrated_parts(attack: Attack) -> Iterator[Calibrated]:
    inner = getattr(attack, "attack", None)
    if isinstance(attack, Calibrated):
        yield attack
    if inner is not None:
        yield from _calibrated_parts(inner)


def _pixel_digests(target: Target, source: Source, rows: Tensor) -> set[bytes]:
    """One hash for each different image, at the model's size; images that cannot be read are left out."""
    chunks = [part.tolist() for part in rows.split(CALIBRATION_BATCH)]
    batches = read_batches(source, chunks, target.preprocess, skip_bad=True)
    return {hashlib.sha256(image.numpy().tobytes()).digest() for batch in batches for image in batch.x}


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


_FORWARDS = 3
"""After so many forward passes an attack has used everything that it needs of a model."""


class _Enough(BaseException):
    """Ends an attack that has started without an error; no Exception, which other libraries' attacks may catch."""


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
    if isinstance(attack, Ensemble):
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
