"""Hue, saturation and value of 8-bit images (n, 3, height, width), in float64 so that truncation is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.corruptions.filtering import to_bytes


@dataclass(frozen=True)
class Color:
    """`place` encodes the hue: the position of each channel between the largest (0) and the smallest (1)."""

    place: Tensor
    saturation: Tensor
    value: Tensor


def hue_saturation_value(pixels: Tensor) -> Color:
    image = pixels.double().div_(255)
    value = image.amax(1, keepdim=True)
    span = value - image.amin(1, keepdim=True)
    saturation = (span / value).nan_to_num_()  # black has saturation 0
    gray = span == 0
    # Gray has no hue; with any saturation it becomes red.
    span.masked_fill_(gray, 1)
    middle = _middle(image, value, span)
    place = image.neg_().add_(value).div_(span)
    place[:, 1:].masked_fill_(gray, 1)
    return Color(torch.where((place > 0) & (place < 1), middle, place), saturation, value)


def _middle(image: Tensor, value: Tensor, span: Tensor) -> Tensor:
    """The place of the middle channel, computed from the hue with the rounding of scikit-image."""
    red, green, blue = image.split(1, dim=1)
    hue = (green - blue).div_(span)
    hue = torch.where(green == value, (blue - red).div_(span).add_(2), hue)
    hue = torch.where(blue == value, (red - green).div_(span).add_(4), hue)
    sixths = hue.div_(6).remainder_(1).mul_(6)
    sector = sixths.floor()
    rest = sixths.sub_(sector)
    return torch.where(sector.remainder_(2) == 1, rest, 1 - rest)


def of_hue_saturation_value(color: Color) -> Tensor:
    image = (color.place * color.saturation).neg_().add_(1).mul_(color.value)
    return to_bytes(image.mul_(255))
