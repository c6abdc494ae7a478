"""Random views of training images for heads, as DINOv2's protocols have them, each determined by (seed, image, step).

Linear probes see random crops, resized, and flips; segmentation heads random scales, crops, flips and colors. Features
of a view are used once, so nothing can be kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as pictures

from vitadel.data.batches import Preprocess
from vitadel.data.sources.masks import VOID, Values, resampling_of
from vitadel.errors import UserError
from vitadel.heads.frozen_features import feature_width, token_features
from vitadel.heads.linear_probe import stacked
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Source

_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of torchvision's RandomResizedCrop
_TRIALS = 10
_SCALES = (0.5, 2.0)  # of the shorter side, in units of the crop
_MOST_OF_ONE = 0.75  # of a crop's pixels: with more of one class another crop is drawn
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = 32 / 255, (0.5, 1.5), (0.5, 1.5), 18 / 180  # OpenCV's circle has 180


@dataclass(frozen=True, eq=False)
class ViewedFeatures:
    """Features of random crops and flips of the images at `rows`, one view per image and step."""

    model: nn.Module
    source: Source
    rows: Tensor
    preprocess: Preprocess
    blocks: int
    seed: int
    device: torch.device | str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return feature_width(self.model)

    def batch(self, chosen: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Tokens as `Features` has them, and labels, of the images at these places."""
        rows = self.rows[chosen]
        numbers = SampleRNG.of_samples(self.seed, rows).stream("probe views", step).uniform(_TRIALS * 4 + 1)
        views = []
        for row, image, own in zip(rows.tolist(), self.source.read(rows.tolist()), numbers, strict=True):
            if isinstance(image, Exception):
                raise UserError(f"sample {row} ({self.source.name(row)}) cannot be read: {image}. Replace it.")
            views.append(random_crop(image, self.preprocess.shape, self.preprocess.interpolation, own))
        with frozen(self.model), torch.no_grad():
            tokens = stacked(token_features(self.model, torch.stack(views).to(self.device) / 255, self.blocks))
        return tokens.float(), self.source.labels()[rows].to(self.device)


def random_crop(image: Image.Image, shape: tuple[int, int], interpolation: str, numbers: Tensor) -> Tensor:
    """A crop of random area and shape, resized to `shape` and perhaps flipped; `numbers` are uniform in [0, 1)."""
    left, top, width, height = crop_box(image.width, image.height, numbers[:-1])
    view = image.crop((left, top, left + width, top + height)).resize(shape[::-1], resampling_of(interpolation))
    pixels = _pixels(view)
    return pixels.flip(2) if float(numbers[-1]) < 0.5 else pixels


def crop_box(wide: int, tall: int, numbers: Tensor) -> tuple[int, int, int, int]:
    """(left, top, width, height) as of torchvision's RandomResizedCrop: the first of ten draws that lies in the image,
    else the largest central crop of an allowed shape."""
    low, high = map(math.log, _RATIO)
    for area_share, ratio_share, left_share, top_share in numbers.view(-1, 4).tolist():
        area = wide * tall * (_AREA[0] + area_share * (_AREA[1] - _AREA[0]))
        ratio = math.exp(low + ratio_share * (high - low))
        width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < width <= wide and 0 < height <= tall:
            return int(left_share * (wide - width + 1)), int(top_share * (tall - height + 1)), width, height
    width, height = min(wide, round(tall * _RATIO[1])), min(tall, round(wide / _RATIO[0]))
    return (wide - width) // 2, (tall - height) // 2, width, height


def _pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


@dataclass(frozen=True)
class RandomScaleCrop:
    """Random scale, crop, flip and colors of image and mask, for one step.

    The shorter side becomes 0.5 to 2 times that of `size`; what a small image does not cover is black, and ignored.
    """

    size: tuple[int, int]
    interpolation: str
    seed: int
    step: int

    def pair(self, image: Image.Image, values: Values, index: int) -> tuple[Tensor, Tensor]:
        """uint8, (3, height, width), and int64, (height, width)."""
        numbers = SampleRNG.of_samples(self.seed, [index]).stream("segmentation views", self.step)
        first, *draws = numbers.uniform(2 + 2 * _TRIALS)[0].tolist()
        *draws, flip = draws
        scale = min(self.size) * (_SCALES[0] + first * (_SCALES[1] - _SCALES[0])) / min(image.size)
        sides = tuple(max(1, round(side * scale)) for side in image.size)
        pixels = _pixels(image.resize(sides, resampling_of(self.interpolation)))
        nearest = Image.fromarray(values.astype(np.int32)).resize(sides, Image.Resampling.NEAREST)
        mask = torch.from_numpy(np.array(nearest, dtype=np.int64))
        right, below = (max(0, side - there) for side, there in zip(self.size[::-1], sides, strict=True))
        pixels, mask = F.pad(pixels, (0, right, 0, below)), F.pad(mask, (0, right, 0, below), value=VOID)
        for left_share, top_share in zip(draws[::2], draws[1::2], strict=True):
            top = int(top_share * (mask.shape[0] - self.size[0] + 1))
            left = int(left_share * (mask.shape[1] - self.size[1] + 1))
            window = (slice(top, top + self.size[0]), slice(left, left + self.size[1]))
            if _varied(mask[window]):
                break
        pixels, mask = pixels[:, *window], mask[window]
        if flip < 0.5:
            pixels, mask = pixels.flip(2), mask.flip(1)
        return recolored(pixels, numbers.stream("colors").uniform(8)[0].tolist()), mask.contiguous()


def _varied(mask: Tensor) -> bool:
    counts = mask[mask != VOID].bincount()
    return int((counts > 0).sum()) > 1 and int(counts.max()) < _MOST_OF_ONE * int(counts.sum())


def recolored(pixels: Tensor, numbers: list[float]) -> Tensor:
    """Brightness, contrast, saturation and hue, each changed with probability 1/2; `numbers` are uniform in [0, 1)."""
    amounts, coins = numbers[:4], [number < 0.5 for number in numbers[4:]]
    changed = pixels.float() / 255
    if coins[0]:
        changed = changed + _BRIGHTNESS * (2 * amounts[0] - 1)
    if coins[1]:
        changed = changed * (_CONTRAST[0] + amounts[1] * (_CONTRAST[1] - _CONTRAST[0]))
    changed = changed.clamp(0, 1)
    if coins[2]:
        factor = _SATURATION[0] + amounts[2] * (_SATURATION[1] - _SATURATION[0])
        changed = pictures.adjust_saturation(changed, factor)
    if coins[3]:
        changed = pictures.adjust_hue(changed, _HUE * (2 * amounts[3] - 1))
    return (255 * changed).round().clamp(0, 255).to(torch.uint8)
