"""The size at which images are corrupted, and how they are resized for the model afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.types import Source

IMAGENET_SHAPE = (224, 224)
"""The size of pictures of ImageNet-C and frames of ImageNet-P."""

_IMAGENET_RESIZE = 256
_SMALL = 96  # pixels; images up to this size are taken as they are


@dataclass(frozen=True)
class Sizes:
    """`made` is the preprocessing before the corruption, `then` that of the corrupted images for the model.

    The strength of a corruption depends on the number of pixels, so the size depends on the data, never on the model.
    """

    made: Preprocess
    then: Preprocess

    @classmethod
    def of(cls, source: Source, model: Preprocess) -> Sizes:
        """As for a benchmark in files: images that were cropped to ImageNet-C's size are not cropped again."""
        made = benchmark_preprocess(source)
        return cls(made, model if made.crop_pct == 1 else replace(model, crop_pct=1.0))

    def fitted(self, z: Tensor) -> Tensor:
        """Corrupted images at the model's size, with the same pixels as if read from files."""
        if tuple(z.shape[2:]) == self.then.shape:
            return z
        pixels = torch.stack([self.then(Image.fromarray(image)) for image in in_bytes(z)])
        return pixels.to(z.device, z.dtype) / 255


def benchmark_preprocess(source: Source, size: int | None = None) -> Preprocess:
    """Images of up to 96 pixels as they are, larger ones as in ImageNet-C: resized to 256 and cropped to 224."""
    if size is None:
        first = first_readable(source, range(len(source)))
        if max(first.size) <= _SMALL:
            return Preprocess((first.height, first.width), 1.0, "bilinear")
    return Preprocess(size or IMAGENET_SHAPE, IMAGENET_SHAPE[0] / _IMAGENET_RESIZE, "bilinear")


def first_readable(source: Source, rows: Iterable[int]) -> Image.Image:
    images = (source.read([row])[0] for row in rows)
    first = next((image for image in images if not isinstance(image, Exception)), None)
    if first is None:
        raise UserError("no image of the data can be read; check its files")
    return first


def in_bytes(z: Tensor) -> NDArray[np.uint8]:
    """Corrupted pixels, which are whole gray levels already, as (n, height, width, 3)."""
    return np.ascontiguousarray((z * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy())
