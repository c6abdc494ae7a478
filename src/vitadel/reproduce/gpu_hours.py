"""Hours of a GPU that a training takes at least: multiply-adds of its model, its recipe's passes, a published rate.

An estimate for one A100 in half precision. ViT-B/16 takes 17.6 billion multiply-adds for an image of 224 pixels, and
PyTorch computes 2,226 of them in a second (forward, batches of 256, A100-40GB, PyTorch 1.12 in fp16; the table of
AITemplate's example for ViT). Smaller models do not keep a GPU as busy, and fp32 without TF32 takes several times as
long, so this is the least. By the peak rates of the data sheets, 989 and 312 TFLOP/s in bf16, an H100 is at most 3.2
times as fast. Reading, validation and audits are not counted.
"""

from __future__ import annotations

import re

from vitadel.training.recipes.build import Recipe

A100 = 2226 * 17.6e9
"""Multiply-adds in a second."""

H100_GAIN = 989 / 312
"""How many times as fast an H100 can be at most."""

_IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000, "cifar100": 50_000}
_CLASSES = {"imagenet": 1000}  # of sets of which recipes take some classes


def training_hours(recipe: Recipe, macs: int | None, classes: int) -> float | None:
    """Hours on an A100 at least; None if the number of images, or the cost of a pass, is not known before.

    As in the progress of a training, a gradient counts as three forward passes, and an update with its loss as four.
    """
    kind = re.split(r"[@(:]", recipe.data.train)[0]
    if macs is None or kind not in _IMAGES:
        return None
    images = _IMAGES[kind] * min(classes / _CLASSES.get(kind, classes), 1.0) - recipe.data.held_out
    images = min(images, recipe.data.limit or images)
    section, attack = recipe.augmentation, recipe.objective.attack
    times = section.repeated_aug if section.repeated_aug_by == "batches" else 1
    gradients, forwards = (0, 0) if attack is None else attack.passes()
    passes = images * times * recipe.epochs * (4 + 3 * gradients + forwards)
    return passes * macs / A100 / 3600
