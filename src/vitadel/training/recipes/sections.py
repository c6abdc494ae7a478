"""What a recipe may say, section by section: the fields are the keys, the defaults what is meant if they are absent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vitadel.attacks.threats import threat as make_threat
from vitadel.errors import UserError
from vitadel.training.recipes.ranges import (
    AT_LEAST_ONE,
    BELOW_ONE,
    BETWEEN,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check_ranges,
)
from vitadel.types import Threat

__all__ = [
    "AuditSection",
    "Augmentation",
    "DataSection",
    "ModelSection",
    "OptimizerSection",
    "Schedule",
    "ThreatSection",
    "TrainSection",
    "Validation",
]

_SEED = Range("a whole number from 0 to 2**62", lambda value: 0 <= value <= 2**62)


@dataclass(frozen=True)
class ModelSection:
    """The model to train: a MODEL spec and what `load_model` takes with it.

    Without `weights` training starts from fresh ones, drawn with the training's seed. `num_classes` is the data's if
    absent, and a checkpoint with another number then gets a new head; if it is given, the checkpoint must have a head
    of that many. `input_size` resamples positions; `crop_pct` and `interpolation` say how images come to that size;
    `small_images` is the patch size (4) to which a patch-16 model is adapted for 32 px. `head_classes` keeps these of a
    checkpoint's classes, in the order of the data's. Without `drop_path` it is as in the checkpoint, or none.
    """

    name: str
    weights: str | None = None
    num_classes: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    input_size: int | None = None
    crop_pct: float | None = None
    interpolation: str | None = None
    small_images: int | None = None
    head_classes: tuple[int, ...] | None = None
    drop_path: float | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self, drop_path=BELOW_ONE, input_size=AT_LEAST_ONE, small_images=AT_LEAST_ONE)


@dataclass(frozen=True)
class DataSection:
    """`train` and `test` are --data specs; the test set is only used for the audit at the end.

    Models are selected on `validation`, another spec, or on `held_out` class-balanced images taken from the training
    data. `limit` uses a class-balanced part of the training data. `extra` is a second source of training images, for
    example generated ones; `extra_share` of every batch comes from it, and an epoch is one pass over `train`. In the
    first `easier_epochs` the images come from `easier`, a variant of `train` with the same samples in the same order.
    """

    train: str
    test: str | None = None
    validation: str | None = None
    held_out: int = 0
    limit: int | None = None
    extra: str | None = None
    extra_share: float = 0.5
    easier: str | None = None
    easier_epochs: int = 0
    root: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            extra_share=BETWEEN,
            held_out=NOT_NEGATIVE,
            limit=AT_LEAST_ONE,
            easier_epochs=NOT_NEGATIVE,
            workers=NOT_NEGATIVE,
        )
        if (self.easier is None) != (self.easier_epochs == 0):
            raise UserError("easier and easier_epochs belong together: a data spec, and for how many epochs it is used")
        if self.validation is None and self.held_out < 1:
            raise UserError(
                "there is nothing to select models on: give validation, a data spec, or held_out, a number of training "
                "images to keep aside. The test set is never used for it."
            )


@dataclass(frozen=True)
class Augmentation:
    """From torchvision v2 and timm. `crop`: 'none', 'pad' (by `padding`, then a random window) or 'resized' (a random
    part of the picture, its area and aspect ratio from `scale` and `ratio`). `rand_augment` is timm's way of writing
    it, e.g. 'rand-m9-mstd0.5-inc1'. With `mixup` or `cutmix` (their alphas) labels become probabilities, in a share
    `mix_probability` of the batches. An epoch holds `repeats` versions of each image, and as many fewer images.
    """

    crop: Literal["none", "pad", "resized"] = "none"
    padding: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0
    rotation: float = 0.0
    color_jitter: float = 0.0
    rand_augment: str | None = None
    erasing: float = 0.0
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    mix_switch: float = 0.5
    repeats: int = 1

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("flip", "erasing", "mix_probability", "mix_switch"), SHARE),
            **dict.fromkeys(("padding", "rotation", "colour_jitter", "mixup", "cutmix"), NOT_NEGATIVE),
            **dict.fromkeys(("scale", "ratio"), POSITIVE),
            repeats=AT_LEAST_ONE,
        )
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"{name} must be two numbers, the smaller one first, got [{low:g}, {high:g}]")


@dataclass(frozen=True)
class ThreatSection:
    """The budget that the model is to withstand: for training, validation and the audit at the end."""

    eps: float = 8 / 255
    norm: str = "linf"

    def __post_init__(self) -> None:
        if not math.isfinite(self.eps):
            raise UserError(f"eps must be a finite number, got {self.eps}")
        self.threat()

    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)


@dataclass(frozen=True)
class OptimizerSection:
    """`name` is one of timm's. `rate` is meant for batches of `rate_batch` images and scaled to the actual size, in
    proportion ('linear') or with its root ('sqrt'); without `rate_batch` it is taken as it is. schedule.warm_up_rate
    and schedule.final_rate are meant for the same batches and scaled with it. Biases, norms and what the model names
    (positions, class token) are not decayed."""

    name: str = "adamw"
    rate: float = 1e-3
    rate_batch: int | None = None
    rate_scaling: Literal["linear", "sqrt"] = "linear"
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: tuple[float, float] | None = None
    eps: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            rate=POSITIVE,
            rate_batch=AT_LEAST_ONE,
            weight_decay=NOT_NEGATIVE,
            momentum=BELOW_ONE,
            betas=BELOW_ONE,
            eps=POSITIVE,
            clip=POSITIVE,
        )


@dataclass(frozen=True)
class Schedule:
    """How the rate changes, in epochs: up from `warm_up_rate` over `warm_up`, by `shape` down to `final_rate`, then
    `cool_down` epochs at where it ended (on top of train.epochs). 'cyclic' rises by itself, from `warm_up_rate` to the
    rate at `peak` of the way, and falls to `final_rate`; 'steps' multiplies by `factor` at each of `milestones`."""

    shape: Literal["cosine", "cyclic", "steps", "constant"] = "cosine"
    warm_up: float = 0.0
    warm_up_rate: float = 0.0
    final_rate: float = 0.0
    cool_down: int = 0
    peak: float = 0.5
    milestones: tuple[float, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("warm_up", "warm_up_rate", "final_rate", "cool_down"), NOT_NEGATIVE),
            peak=BETWEEN,
            milestones=POSITIVE,
            factor=POSITIVE,
        )
        if self.shape == "cyclic" and self.warm_up:
            raise UserError(
                f"'cyclic' rises by itself and would ignore warm_up, got {self.warm_up:g}; set warm_up to 0, and peak "
                "to where the rate is highest"
            )
        if self.shape in ("steps", "constant") and self.final_rate:
            raise UserError(
                f"the shape '{self.shape}' has no final_rate, got {self.final_rate:g}; use cosine or cyclic"
            )
        if (self.shape == "steps") != bool(self.milestones):
            raise UserError(
                f"the shape 'steps' and milestones belong together, got '{self.shape}' and {list(self.milestones)}"
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(f"milestones must be epochs in ascending order, got {list(self.milestones)}")

    def said_of_length(self, epochs: int) -> str | None:
        if self.warm_up >= epochs:
            return f"the rate rises for {self.warm_up:g} epochs, and there are {epochs}: it never gets full"
        late = [f"{milestone:g}" for milestone in self.milestones if milestone >= epochs]
        return f"there are {epochs} epochs, so nothing happens at {', '.join(late)}" if late else None


@dataclass(frozen=True)
class TrainSection:
    """`batch_size` counts the images of one optimiser step over all processes; `accumulation` cuts it into so many
    parts. `attack_mode`: attacks see the model in 'eval' mode, or in 'train' mode as some papers do. `checkpoint_every`
    optimiser steps the whole state is saved."""

    epochs: int
    batch_size: int = 128
    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    attack_mode: Literal["eval", "train"] = "eval"
    seed: int = 0
    checkpoint_every: int = 200
    tracker: str = "tensorboard"

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("epochs", "batch_size", "accumulation", "checkpoint_every"), AT_LEAST_ONE)
        check_ranges(self, **counts, seed=_SEED)


@dataclass(frozen=True)
class Validation:
    """After every so many epochs (`every`, and the last), `limit` held-out images are attacked at full eps; the epoch
    with the best robust accuracy is kept. Without an attack the clean accuracy decides."""

    attack: str | None = "pgd-10"
    every: int = 1
    limit: int | None = 500

    def __post_init__(self) -> None:
        check_ranges(self, every=AT_LEAST_ONE, limit=AT_LEAST_ONE)


@dataclass(frozen=True)
class AuditSection:
    """The light suite at the end, on the test set."""

    attacks: tuple[str, ...] = ("pgd-20", "apgd-ce")
    limit: int | None = 500
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_ranges(self, limit=AT_LEAST_ONE, batch_size=AT_LEAST_ONE)
