"""Training pictures, varied: torchvision's v2 transforms and timm's, each picture with random numbers of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, Mixup
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as pictures

from vitadel.data.preprocess import Preprocess
from vitadel.errors import UserError
from vitadel.training.recipes.sections import Augmentation

__all__ = ["Augment", "augment", "mixing", "seed_everything"]

Augment = Callable[[Image.Image, int], Tensor]
"""(picture, seed) -> uint8 pixels of the model's size."""


def seed_everything(seed: int) -> None:
    """torch, NumPy and Python: timm's transforms draw from the latter two."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def augment(section: Augmentation, preprocess: Preprocess) -> Augment:
    """The order is timm's: crop, flip, turn, RandAugment or colour jitter, erasing.

    Erasing paints with the mean colour: noise around zero, as in timm, is meant for normalised images and would leave
    the box of pixels.
    """
    how = v2.InterpolationMode(section.interpolation)
    steps: list[Callable[..., object]] = []
    if section.crop == "resized":
        steps.append(
            v2.RandomResizedCrop(preprocess.shape, section.scale, section.ratio, interpolation=how, antialias=True)
        )
    else:
        steps.append(preprocess)
    if section.crop == "pad":
        steps.append(v2.RandomCrop(preprocess.shape, padding=section.padding))
    if section.hflip:
        steps.append(v2.RandomHorizontalFlip(section.hflip))
    if section.rotation:
        steps.append(v2.RandomRotation(section.rotation, interpolation=v2.InterpolationMode.BILINEAR))
    mean = preprocess.mean if any(preprocess.mean) else IMAGENET_DEFAULT_MEAN  # raw pixels have a mean, too
    color = tuple(round(255 * part) for part in mean)
    if section.auto_augment:
        try:
            policy = rand_augment_transform(section.auto_augment, {"img_mean": color})
        except (AssertionError, ValueError, NotImplementedError, KeyError) as error:
            raise UserError(
                f"auto_augment {section.auto_augment!r} is not in timm's way of writing: {error}. "
                "Write it like rand-m9-mstd0.5-inc1."
            ) from error
        steps += [_as_picture, policy]
    elif section.color_jitter:
        steps.append(v2.ColorJitter(*[section.color_jitter] * 3))
    steps.append(_as_pixels)
    if section.reprob:
        steps.append(v2.RandomErasing(section.reprob, value=list(color)))
    return _Varied(tuple(steps))


@dataclass(frozen=True)
class _Varied:
    """One step after the other. A class, as worker processes that are spawned get theirs pickled."""

    steps: tuple[Callable[..., object], ...]

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        seed_everything(seed)
        result: object = image
        for step in self.steps:
            result = step(result)
        assert isinstance(result, Tensor)
        return result


def _as_picture(image: Image.Image | Tensor) -> Image.Image:
    picture: Image.Image = pictures.to_pil_image(image) if isinstance(image, Tensor) else image
    return picture


def _as_pixels(image: Image.Image | Tensor) -> Tensor:
    pixels: Tensor = image if isinstance(image, Tensor) else pictures.pil_to_tensor(image)
    return pixels


def mixing(section: Augmentation, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's MixUp and CutMix on a batch, which makes labels probabilities; None where the recipe has neither."""
    if not (section.mixup or section.cutmix):
        return None
    mixup: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = Mixup(
        mixup_alpha=section.mixup,
        cutmix_alpha=section.cutmix,
        prob=section.mixup_prob,
        switch_prob=section.mixup_switch_prob,
        label_smoothing=0.0,
        num_classes=num_classes,
    )
    return mixup
