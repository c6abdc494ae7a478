"""The sections of a recipe for heads on frozen features; `head.use` decides between the two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitadel.attacks.threats import make_threat
from vitadel.errors import UserError
from vitadel.quantities import (
    AT_LEAST_ONE,
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    Range,
    check_ranges,
)
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.types import Threat

LEARNING_RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""DINOv2's base learning rates, for batches of 256; they are scaled in proportion for others."""

_MASK_CLASSES = Range("from 2 to 255, as 255 marks pixels to leave out", lambda value: 2 <= value <= 255)
_MASK_VALUE = Range("from 0 to 255, what a mask's pixel can hold", lambda value: 0 <= value <= 255)


@dataclass(frozen=True)
class ProbeData:
    """Data of a linear probe: `train` and `test` are --data specs.

    Heads are compared on `held_out` class-balanced images of the training data, on which no head is trained; `limit`
    uses a class-balanced part of the others. With `augment` every step sees new random crops and flips, as in DINOv2's
    protocol; without, features are computed once, of the center crop.
    """

    train: str
    test: str
    held_out: int = 500
    limit: int | None = None
    root: str | None = None
    augment: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, held_out=AT_LEAST_ONE, limit=AT_LEAST_ONE)


@dataclass(frozen=True)
class MaskData:
    """Data of a segmentation head: `train` and `test` are specs of images with masks.

    Images and masks are resized to cover `size`, (height, width), by default the model's, and center-cropped. The
    number of `classes` of the masks must be given, except for shapes; pixels with the values `void` are ignored. With
    `from_one` classes count from 1 and 0 is ignored, as in ADE20K. Patch tokens are computed once and kept if they take
    no more than `cache_mb` of main memory. With `augment` every step sees new random scales, crops, flips and colors.
    With `stride` clean test images are judged whole, by windows of `size` at this distance, whose logits are averaged.
    """

    train: str
    test: str
    held_out: int = 50
    limit: int | None = None
    root: str | None = None
    size: tuple[int, int] | None = None
    classes: int | None = None
    void: tuple[int, ...] = ()
    from_one: bool = False
    cache_mb: int = 2000
    augment: bool = False
    stride: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            **dict.fromkeys(("held_out", "limit", "size", "stride"), AT_LEAST_ONE),
            classes=_MASK_CLASSES,
            void=_MASK_VALUE,
            cache_mb=NOT_NEGATIVE,
        )


@dataclass(frozen=True)
class LinearHead:
    """Linear layers, one for every combination of inputs and learning rate.

    Inputs are the class tokens of the last `blocks` blocks, with or without the `average` of the patch tokens. `lrs`
    are for batches of 256 and scaled in proportion. `half` keeps features in half precision.
    """

    blocks: tuple[int, ...] = (1, 4)
    average: tuple[bool, ...] = (False, True)
    lrs: tuple[float, ...] = LEARNING_RATES
    half: bool = False

    def __post_init__(self) -> None:
        check_ranges(self, blocks=AT_LEAST_ONE, lrs=POSITIVE)
        _check_lists(self, "blocks", "average", "lrs")


@dataclass(frozen=True)
class PatchHead:
    """BatchNorm and a 1x1 convolution on the last block's patch tokens, one head for each of `lrs`, trained by AdamW.

    The learning rate rises over a share `warmup_share` of the steps and falls linearly to 0.
    """

    lrs: tuple[float, ...] = (1e-3,)
    weight_decay: float = 1e-4
    warmup_share: float = 0.0375

    def __post_init__(self) -> None:
        check_ranges(self, lrs=POSITIVE, weight_decay=NOT_NEGATIVE, warmup_share=BELOW_ONE)
        _check_lists(self, "lrs")


@dataclass(frozen=True)
class HeadTraining:
    """The training of every head: `steps` batches of `batch_size` images."""

    steps: int
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self, steps=AT_LEAST_ONE, batch_size=AT_LEAST_ONE, seed=SEED)


@dataclass(frozen=True)
class ProbeAudit:
    """The audit of the chosen head: clean, and under `attacks` through model and head, on `limit` test images or all.

    For segmentation the attacks are pgd-K on the mean cross-entropy of the pixels.
    """

    attacks: tuple[str, ...] = ()
    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = None
    batch_size: int = 64

    def __post_init__(self) -> None:
        check_ranges(self, limit=AT_LEAST_ONE, batch_size=AT_LEAST_ONE)
        self.threat()

    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)


HEADS: Mapping[str, Mapping[str, type]] = {
    "linear": {"data": ProbeData, "head": LinearHead},
    "segmentation": {"data": MaskData, "head": PatchHead},
}
"""The sections that depend on `head.use`."""


def probe_types(head: object) -> dict[str, type]:
    """The dataclasses of a probe recipe with this head section; those of `linear` if `use` is missing."""
    use = head.get("use") if isinstance(head, Mapping) else None
    own = HEADS.get(use, HEADS["linear"]) if isinstance(use, str) else HEADS["linear"]
    return {"model": ModelSection, **own, "train": HeadTraining, "audit": ProbeAudit}


def _check_lists(section: object, *names: str) -> None:
    for name in names:
        values = getattr(section, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name} must be a list with at least one entry and none twice, got {list(values)}")
