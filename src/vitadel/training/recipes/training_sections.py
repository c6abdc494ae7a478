"""The sections of a training recipe: fields are keys, defaults hold where a key is absent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from vitadel.attacks.threats import make_threat
from vitadel.errors import UserError
from vitadel.quantities import (
    AT_LEAST_ONE,
    BELOW_ONE,
    BETWEEN,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    WORKERS,
    check_ranges,
)
from vitadel.types import Threat


@dataclass(frozen=True)
class ModelSection:
    """The model to train: a MODEL spec and what `load_model` takes with it.

    Without `weights` training starts from random ones, drawn with the training's seed. `num_classes` defaults to the
    data's, and a checkpoint with another number gets a new head; if it is given, the checkpoint must have a head of
    that size. `input_size` resamples position embeddings; `crop_pct` and `interpolation` define how images are resized
    to it; `small_images` is the patch size (4) to which a patch-16 model is adapted for 32 px. `head_classes` selects
    classes of the checkpoint's head, in the order of the data's. `drop_path` defaults to the checkpoint's, or 0.
    `kwargs` are arguments of timm's model; `attention_scale` among them multiplies all pre-softmax scores by a number.
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

    def options(self) -> dict[str, Any]:
        """What `load_model` takes besides weights and classes."""
        names = ("mean", "std", "input_size", "crop_pct", "interpolation")
        drop_path = {} if self.drop_path is None else {"drop_path_rate": self.drop_path}
        return {
            **{name: getattr(self, name) for name in names},
            "small_images": self.small_images or False,
            "kwargs": {**self.kwargs, **drop_path},
        }


@dataclass(frozen=True)
class DataSection:
    """The data: `train` and `test` are --data specs; the test set is only used for the audit at the end.

    Models are selected on `validation`, another spec, or on `held_out` class-balanced images of the training data.
    `limit` uses a class-balanced part of the training data. `extra` is a second source of training images, for example
    generated ones; a share `extra_share` of every batch comes from it, and an epoch is one pass over `train`. In the
    first `easier_epochs` images are read from `easier`, a variant of `train` with the same samples in the same order.
    `skip_bad` trains on another image where one cannot be read, and counts and lists such images. `shuffle_buffer` is
    for shards and parquet files that are read in order: images move by less than so many places in an epoch, and blocks
    of so many are in random order; by default all images are shuffled.
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
    skip_bad: bool = False
    shuffle_buffer: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            extra_share=BETWEEN,
            held_out=NOT_NEGATIVE,
            limit=AT_LEAST_ONE,
            easier_epochs=NOT_NEGATIVE,
            workers=WORKERS,
            shuffle_buffer=AT_LEAST_ONE,
        )
        if (self.easier is None) != (self.easier_epochs == 0):
            raise UserError(
                "easier and easier_epochs belong together: a data spec, and the number of epochs that use it"
            )
        if self.validation is None and self.held_out < 1:
            raise UserError(
                "there is nothing to select models on: give validation, a data spec, or held_out, a number of training "
                "images to hold out. The test set is never used for it."
            )


@dataclass(frozen=True)
class Augmentation:
    """Image augmentation with torchvision's and timm's transforms, under timm's names.

    `crop`: 'none', 'pad' (`padding`, then a random window) or 'resized' (RandomResizedCrop with `scale` and `ratio`).
    `auto_augment` is a RandAugment policy in timm's notation, e.g. 'rand-m9-mstd0.5-inc1'; `reprob` the probability of
    random erasing; `color_jitter` also acts beside `auto_augment`. `mixup` and `cutmix` are alphas; they turn labels
    into probabilities, in a share `mixup_prob` of the batches. With `repeated_aug_by` 'images' an epoch holds
    `repeated_aug` versions of each image, and as many fewer images (DeiT); with 'batches' every batch is trained on
    `repeated_aug` times in a row, first without any augmentation, so that an epoch is as many times longer.
    `on_device` crops ('pad'), mirrors, jitters and erases whole batches on the training's device instead of image by
    image while reading, with the same random numbers; the others of these transforms are refused with it.
    """

    crop: Literal["none", "pad", "resized"] = "none"
    padding: int = 4
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.0
    rotation: float = 0.0
    color_jitter: float = 0.0
    auto_augment: str | None = None
    reprob: float = 0.0
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    repeated_aug: int = 1
    repeated_aug_by: Literal["images", "batches"] = "images"
    on_device: bool = False

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("hflip", "reprob", "mixup_prob", "mixup_switch_prob"), SHARE),
            **dict.fromkeys(("padding", "rotation", "color_jitter", "mixup", "cutmix"), NOT_NEGATIVE),
            **dict.fromkeys(("scale", "ratio"), POSITIVE),
            repeated_aug=AT_LEAST_ONE,
        )
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"{name} must be two numbers, the smaller one first, got [{low:g}, {high:g}]")
        if self.on_device:
            self._refuse_what_devices_lack()

    def _refuse_what_devices_lack(self) -> None:
        lacking = {
            "crop: resized, which needs the image as it is in its file": self.crop == "resized",
            f"rotation: {self.rotation:g}, which interpolates": bool(self.rotation),
            f"auto_augment: {self.auto_augment}, which is made of Pillow's functions": self.auto_augment is not None,
        }
        if any(lacking.values()):
            given = "; ".join(what for what, lacks in lacking.items() if lacks)
            raise UserError(
                f"on_device has no {given}. It has crop: pad, hflip, color_jitter and reprob; leave out the others, or "
                "set on_device: false"
            )


@dataclass(frozen=True)
class ThreatSection:
    """The threat model of training, validation and the audit at the end."""

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
    """One of timm's optimizers by `name`, and its settings.

    `lr` is meant for batches of `lr_reference_batch` images and scaled to the actual batch size, in proportion
    (`lr_scaling` 'linear') or with its square root ('sqrt'); without `lr_reference_batch` it is used as given.
    `schedule.warmup_lr` and `schedule.min_lr` are scaled with it. Biases, norms and what the model names (position
    embeddings, class token) are not decayed. `layer_decay` multiplies the rate once per layer below the head, for
    fine-tuning. `fused` updates all weights in one kernel; by default where the device is a GPU and torch has one.
    """

    name: str = "adamw"
    lr: float = 1e-3
    lr_reference_batch: int | None = None
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: tuple[float, float] | None = None
    eps: float | None = None
    clip_grad_norm: float | None = None
    layer_decay: float | None = None
    fused: bool | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            lr=POSITIVE,
            lr_reference_batch=AT_LEAST_ONE,
            weight_decay=NOT_NEGATIVE,
            momentum=BELOW_ONE,
            betas=BELOW_ONE,
            eps=POSITIVE,
            clip_grad_norm=POSITIVE,
            layer_decay=SHARE,
        )

    def lr_factor(self, batch_size: int) -> float:
        """The factor of all learning rates for batches of this size."""
        if self.lr_reference_batch is None:
            return 1.0
        ratio = batch_size / self.lr_reference_batch
        return math.sqrt(ratio) if self.lr_scaling == "sqrt" else ratio


@dataclass(frozen=True)
class Schedule:
    """The learning rate over time, in epochs.

    It rises from `warmup_lr` over `warmup_epochs`, follows `shape` down to `min_lr`, and stays there for
    `cooldown_epochs` on top of train.epochs. 'cyclic' rises from `warmup_lr` to the full rate at a fraction `pct_start`
    of the training and falls to `min_lr`; 'steps' multiplies by `decay_rate` at each of `milestones`.
    """

    shape: Literal["cosine", "cyclic", "steps", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    cooldown_epochs: int = 0
    pct_start: float = 0.5
    milestones: tuple[float, ...] = ()
    decay_rate: float = 0.1

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("warmup_epochs", "warmup_lr", "min_lr", "cooldown_epochs"), NOT_NEGATIVE),
            pct_start=BETWEEN,
            milestones=POSITIVE,
            decay_rate=POSITIVE,
        )
        if self.shape == "cyclic" and self.warmup_epochs:
            raise UserError(
                f"'cyclic' has its own rise and would ignore warmup_epochs, got {self.warmup_epochs:g}; set "
                "warmup_epochs to 0, and pct_start to where the rate is highest"
            )
        if self.shape in ("steps", "constant") and self.min_lr:
            raise UserError(f"the shape '{self.shape}' has no min_lr, got {self.min_lr:g}; use cosine or cyclic")
        if (self.shape == "steps") != bool(self.milestones):
            raise UserError(
                f"the shape 'steps' and milestones belong together, got '{self.shape}' and {list(self.milestones)}"
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(f"milestones must be epochs in ascending order, got {list(self.milestones)}")

    def lr_at(self, lr: float, epochs: int, progress: float) -> float:
        """The learning rate after `progress` epochs of a training of `epochs` (cooldown not counted), at most `lr`.

        A pure function, so that a resumed run needs no scheduler state. As in timm, the cosine starts with the training
        and not with the end of the warm-up.
        """
        if self.shape != "cyclic" and progress < self.warmup_epochs:
            return self.warmup_lr + (lr - self.warmup_lr) * progress / self.warmup_epochs
        done = min(progress / epochs, 1.0)
        if self.shape == "cosine":
            return self.min_lr + (lr - self.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
        if self.shape == "cyclic":
            rising = done < self.pct_start
            low = self.warmup_lr if rising else self.min_lr
            return low + (lr - low) * (done / self.pct_start if rising else (1 - done) / (1 - self.pct_start))
        if self.shape == "steps":
            return lr * self.decay_rate ** sum(progress >= milestone for milestone in self.milestones)
        return lr

    def length_warning(self, epochs: int) -> str | None:
        """A sentence if the training is too short for this schedule."""
        if self.warmup_epochs >= epochs:
            return f"the warm-up takes {self.warmup_epochs:g} of {epochs} epochs: the full rate is never reached"
        late = [f"{milestone:g}" for milestone in self.milestones if milestone >= epochs]
        return f"there are {epochs} epochs, so nothing happens at {', '.join(late)}" if late else None


@dataclass(frozen=True)
class TrainSection:
    """How long and in which batches to train.

    `batch_size` counts the images of one optimizer step over all processes; `grad_accum` splits it into that many
    micro-batches. `amp_dtype` is the precision of the loss; 'auto' is bf16 on a GPU that has it, else fp32.
    `attack_mode`: attacks see the model in 'eval' mode, or in 'train' mode as in some papers. The whole state is saved
    every `checkpoint_every` optimizer steps. For GPUs: `tf32` multiplies matrices in TF32, `channels_last` is the
    memory format of images and convolutions, `checkpointing` computes the activations of blocks again in the backward
    pass instead of keeping them, `compile` compiles the model for steps and attacks by torch.compile, and `fsdp`
    divides weights, gradients and the optimizer's state among the processes (FSDP2).
    """

    epochs: int
    batch_size: int = 128
    grad_accum: int = 1
    amp_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    attack_mode: Literal["eval", "train"] = "eval"
    seed: int = 0
    checkpoint_every: int = 200
    tracker: str = "tensorboard"
    tf32: bool = False
    channels_last: bool = False
    checkpointing: bool = False
    compile: bool = False
    fsdp: bool = False

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("epochs", "batch_size", "grad_accum", "checkpoint_every"), AT_LEAST_ONE)
        check_ranges(self, **counts, seed=SEED)


@dataclass(frozen=True)
class Validation:
    """Attack `limit` held-out images at full eps after every `every` epochs and the last one.

    The weights of the epoch with the best robust accuracy are kept; without an attack, with the best clean accuracy.
    """

    attack: str | None = "pgd-10"
    every: int = 1
    limit: int | None = 500

    def __post_init__(self) -> None:
        check_ranges(self, every=AT_LEAST_ONE, limit=AT_LEAST_ONE)


@dataclass(frozen=True)
class AuditSection:
    """The audit at the end, on the test set.

    With `independent` every attack gets all correctly classified images, as in the columns of papers; else each gets
    those that the earlier ones left, and the last number is the worst case.
    """

    attacks: tuple[str, ...] = ("pgd-20", "apgd-ce")
    limit: int | None = 500
    batch_size: int = 128
    independent: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, limit=AT_LEAST_ONE, batch_size=AT_LEAST_ONE)
