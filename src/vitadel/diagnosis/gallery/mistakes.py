"""Accidents rather than defenses: train mode left on, wrong normalization, classes in another order."""

from __future__ import annotations

import copy

from torch import nn

from vitadel.diagnosis.gallery.entry import ROBUST, BrokenDefense, after, before


def _dropout_left(model: nn.Module) -> nn.Module:
    """Put dropout before the model, in train mode."""
    return nn.Sequential(nn.Dropout2d(0.2), copy.deepcopy(model)).train()


def _batch_norm_left(model: nn.Module) -> nn.Module:
    """Put batch norm before the model, in train mode."""
    return nn.Sequential(nn.BatchNorm2d(3, affine=False), copy.deepcopy(model)).train()


MISTAKES = (
    BrokenDefense(
        "another order",
        "the classes of another list",
        after(lambda z: z.roll(1, 1)),
        ("clean-accuracy",),
        family="mistakes",
    ),
    BrokenDefense(
        "dropout left in train mode", "model.eval() forgotten", _dropout_left, ("train-mode",), family="mistakes"
    ),
    BrokenDefense(
        "batch norm left in train mode", "model.eval() forgotten", _batch_norm_left, ("train-mode",), family="mistakes"
    ),
    BrokenDefense(
        "normalised twice",
        "normalised outside and inside",
        before(lambda x: (x - 0.5) / 0.5),
        ("normalization",),
        family="mistakes",
    ),
    BrokenDefense(
        "normalization outside",
        "expects normalized pixels, and is given pixels",
        before(lambda x: 0.5 * x + 0.5),
        ("normalization",),
        ROBUST,
        "mistakes",
    ),
    BrokenDefense(
        "bytes expected", "divides by 255 itself", before(lambda x: x / 255), ("normalization",), family="mistakes"
    ),
)
