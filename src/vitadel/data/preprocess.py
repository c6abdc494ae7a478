"""From an image of any size to the model's pixels: timm's evaluation transform without its normalization."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitadel.errors import UserError, nearest_names

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class Preprocess:
    """Resize to size / crop_pct, then crop the center; an image of the given size is not changed.

    The exception keeps 32-pixel sets on 32-pixel models unchanged, bit for bit, for any `crop_pct`. `size` is one
    number or (height, width). `crop_mode`: 'center' keeps the aspect ratio and drops the edges, 'squash' changes the
    aspect ratio, 'border' pads with the `mean` color.
    """

    size: tuple[int, int] | int
    crop_pct: float = 1.0
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)

    def __post_init__(self) -> None:
        if min(self.shape) < 1:
            raise UserError(f"the image size must be positive, got {self.size}")
        if not 0 < self.crop_pct <= 1:
            raise UserError(f"crop_pct must be in (0, 1], got {self.crop_pct}")
        for what, given, known in (
            ("interpolation", self.interpolation, _INTERPOLATIONS),
            ("crop_mode", self.crop_mode, _CROP_MODES),
        ):
            if given not in known:
                raise UserError(f"unknown {what} '{given}'; known: {', '.join(known)}{nearest_names(given, known)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def about(self) -> str:
        """A description, for images of another size."""
        height, width = self.shape
        tall, wide = (math.floor(side / self.crop_pct) for side in self.shape)
        size = f"{tall} pixels" if tall == wide else f"{tall} x {wide} pixels"
        how = {"center": f"shorter side to {size}", "squash": f"squashed to {tall} x {wide} pixels"}
        first = how.get(self.crop_mode, f"longer side to {size}, then padded")
        return f"{first} ({self.interpolation}), then the central {height} x {width}"

    def __call__(self, image: Image.Image) -> Tensor:
        """Transform an RGB image to uint8 of shape (3, height, width)."""
        if (image.height, image.width) == self.shape:
            return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()
        return _transform(self)(image)


@lru_cache(maxsize=16)
def _transform(settings: Preprocess) -> Callable[[Image.Image], Tensor]:
    from timm.data import create_transform  # here, as importing timm takes seconds and 32-pixel sets do not need it

    transform = create_transform(
        input_size=(3, *settings.shape),
        is_training=False,
        crop_pct=settings.crop_pct,
        crop_mode=settings.crop_mode,
        interpolation=settings.interpolation,
        mean=settings.mean,
        normalize=False,
    )
    return cast("Callable[[Image.Image], Tensor]", transform)
