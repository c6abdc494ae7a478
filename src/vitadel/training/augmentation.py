"""Augmentation of training images by transforms of torchvision and timm, with a seed per image."""

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
from vitadel.training.recipes.training_sections import Augmentation

__all__ = ["Augment", "make_augment", "make_mixup", "seed_everything"]

Augment = Callable[[Image.Image, int], Tensor]
"""(image, seed) -> uint8 pixels of the model's size."""


def seed_everything(seed: int) -> None:
    """Seed torch, NumPy and Python; timm's transforms draw from the latter two."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def make_augment(section: Augmentation, preprocess: Preprocess) -> Augment:
    """The transforms in timm's order: crop, flip, rotation, RandAugment or color jitter, random erasing.

    Erasing fills with the mean color: noise around zero, as in timm, is meant for normalized images and would leave the
    range of pixels.
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
    mean = preprocess.mean if any(preprocess.mean) else IMAGENET_DEFAULT_MEAN
    color = tuple(round(255 * part) for part in mean)
    if section.auto_augment:
        try:
            policy = rand_augment_transform(section.auto_augment, {"img_mean": color})
        except (AssertionError, ValueError, NotImplementedError, KeyError) as error:
            raise UserError(
                f"auto_augment {section.auto_augment!r} is not in timm's notation: {error}. "
                "Write it like rand-m9-mstd0.5-inc1."
            ) from error
        steps += [_as_picture, policy]
    elif section.color_jitter:
        steps.append(v2.ColorJitter(*[section.color_jitter] * 3))
    steps.append(_as_pixels)
    if section.reprob:
        steps.append(v2.RandomErasing(section.reprob, value=list(color)))
    return _Transforms(tuple(steps))


@dataclass(frozen=True)
class _Transforms:
    """Transforms in sequence; a class, because spawned worker processes pickle it."""

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


def make_mixup(section: Augmentation, num_classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """timm's MixUp and CutMix of a batch, which turn labels into probabilities; None if the recipe has neither."""
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
