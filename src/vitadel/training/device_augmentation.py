"""Augmentation of a whole batch on its device: crop, flip, color jitter and erasing as tensor operations on bytes.

What is random is drawn on the CPU, image by image, in torchvision's order and from the seed that the image has in the
reading processes, so both places crop, mirror, color and erase alike. One table of numbers travels beside the pixels,
and nothing makes the CPU wait for the device.

Crop, flip and erasing give torchvision's bytes. Color jitter rounds products and sums one after the other, which is the
same on every device and for every batch; torchvision's kernel for CPUs rounds them together, so a few pixels in 100,000
differ, by one to three levels of 255.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

_WINDOW = slice(0, 2)  # columns of the table: top and left in the padded image
_FLIP = 2
_ORDER, _FACTORS, _REMAINDERS = slice(3, 6), slice(6, 9), slice(9, 12)  # of the three changes of color
_BOX = slice(12, 16)  # top, left, bottom and right of what is erased
_COLOR = slice(16, 19)
_BRIGHTNESS, _CONTRAST, _SATURATION = range(3)  # torchvision's numbers; 3 is the hue, which no recipe changes
_ERASED_SHARE, _ERASED_RATIO, _ERASED_TRIALS = (0.02, 0.33), (0.3, 3.3), 10  # torchvision's defaults
_LUMA = (2989.0, 5870.0, 1140.0)  # ten-thousandths of red, green and blue


@dataclass(frozen=True)
class DeviceAugmentation:
    """Random windows of images padded by `padding`, mirrored, jittered and erased with `color`; 0 turns a part off."""

    shape: tuple[int, int]
    color: tuple[int, int, int]
    padding: int = 0
    hflip: float = 0.0
    color_jitter: float = 0.0
    reprob: float = 0.0

    def draw(self, seeds: Sequence[int]) -> DrawnAugmentation:
        """What each image gets, a pure function of its seed; torch's global generator is left alone."""
        rows: list[tuple[float, ...]] = []
        generator = Generator()
        for seed in seeds:
            generator.manual_seed(seed)
            window, flip, jitter = self._window(generator), self._flip(generator), self._jitter(generator)
            rows.append((*window, flip, *jitter, *self._box(generator), *self.color))
        return DrawnAugmentation(self, torch.tensor(rows, dtype=torch.float32).view(len(rows), _COLOR.stop))

    def _window(self, generator: Generator) -> tuple[int, ...]:
        if not self.padding:
            return 0, 0
        return tuple(torch.randint(0, 2 * self.padding + 1, (2,), generator=generator).tolist())

    def _flip(self, generator: Generator) -> bool:
        return bool(self.hflip) and _happens(self.hflip, generator)

    def _jitter(self, generator: Generator) -> tuple[float, ...]:
        """The order of the three changes, and for each the weight of the image and of what it is blended with."""
        if not self.color_jitter:
            return (_BRIGHTNESS,) * 3 + (1.0,) * 3 + (0.0,) * 3
        order = [each for each in torch.randperm(4, generator=generator).tolist() if each <= _SATURATION]
        low, high = max(0.0, 1.0 - self.color_jitter), 1.0 + self.color_jitter
        factors = [_uniform(low, high, generator) for _ in range(3)]
        return (*order, *(factors[each] for each in order), *(1.0 - factors[each] for each in order))

    def _box(self, generator: Generator) -> tuple[int, int, int, int]:
        """The rectangle to erase, of a random area and aspect ratio; empty if there is none."""
        if not self.reprob or not _happens(self.reprob, generator):
            return 0, 0, 0, 0
        height, width = self.shape
        low, high = torch.log(torch.tensor(_ERASED_RATIO)).tolist()
        for _ in range(_ERASED_TRIALS):
            area = height * width * _uniform(*_ERASED_SHARE, generator)
            ratio = torch.exp(torch.tensor(_uniform(low, high, generator))).item()
            tall, wide = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if tall < height and wide < width:
                top = int(torch.randint(0, height - tall + 1, (), generator=generator))
                left = int(torch.randint(0, width - wide + 1, (), generator=generator))
                return top, left, top + tall, left + wide
        return 0, 0, 0, 0

    def apply(self, pixels: Tensor, table: Tensor) -> Tensor:
        """The bytes of a batch augmented as `table` says, on their device."""
        if self.padding:
            pixels = _windows(pixels, self.padding, table[:, _WINDOW].long())
        if self.hflip:
            pixels = torch.where(table[:, _FLIP].bool()[:, None, None, None], pixels.flip(3), pixels)
        if self.color_jitter:
            pixels = _jittered(pixels, table)
        if self.reprob:
            pixels = _erased(pixels, table[:, _BOX], table[:, _COLOR].to(pixels.dtype))
        return pixels


@dataclass(frozen=True, eq=False)
class DrawnAugmentation:
    """What was drawn for the images of one batch: a row of `table` for each."""

    augmentation: DeviceAugmentation
    table: Tensor


def _happens(chance: float, generator: Generator) -> bool:
    return bool(torch.rand((), generator=generator) < chance)


def _uniform(low: float, high: float, generator: Generator) -> float:
    return float(torch.empty(()).uniform_(low, high, generator=generator))


def _windows(pixels: Tensor, padding: int, corners: Tensor) -> Tensor:
    """A window of every image on a black border; the view of all windows takes no memory."""
    height, width = pixels.shape[2:]
    views = functional.pad(pixels, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    windows: Tensor = views[torch.arange(len(pixels), device=pixels.device), :, corners[:, 0], corners[:, 1]]
    return windows.contiguous()


def _jittered(pixels: Tensor, table: Tensor) -> Tensor:
    """Three changes of color in the order of each image: blends with black, its mean gray, or itself in gray."""
    x = pixels.float()
    size = torch.full((), pixels.shape[2] * pixels.shape[3], device=x.device, dtype=x.dtype)
    columns = (table[:, part, None, None].unbind(1) for part in (_ORDER, _FACTORS, _REMAINDERS))
    for change, factor, remainder in zip(*columns, strict=True):
        gray = _luma(x)
        # A divisor on the device, as CUDA multiplies by the reciprocal of a number; the sum of integers is exact.
        mean = gray.sum((1, 2), keepdim=True, dtype=torch.int64).to(x.dtype) / size
        other = torch.where(change == _CONTRAST, mean, torch.where(change == _SATURATION, gray, torch.zeros_like(gray)))
        x = (x * factor[:, None] + (other * remainder)[:, None]).clamp(0, 255).floor()
    return x.to(pixels.dtype)


def _luma(x: Tensor) -> Tensor:
    """Levels of gray, rounded down."""
    red, green, blue = (channel * weight for channel, weight in zip(x.unbind(1), _LUMA, strict=True))
    # The sum is an integer; half of one keeps the product far enough from whole levels for every rounding.
    return (red + green + blue).add(0.5).mul(1e-4).floor()


def _erased(pixels: Tensor, box: Tensor, color: Tensor) -> Tensor:
    top, left, bottom, right = box[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=pixels.device) for side in pixels.shape[2:])
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    return torch.where(inside[:, None], color[:, :, None, None], pixels)
