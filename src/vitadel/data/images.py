"""From bytes to an RGB image as timm's readers do it, `convert("RGB")` without EXIF rotation; the base of sources."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitadel.data.jpeg import decode_jpeg
from vitadel.errors import UserError

IMAGE_EXTENSIONS = frozenset(["bmp", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"])

Item = TypeVar("Item")


class LabeledImages:
    """A source whose labels are in memory and whose images are read one by one."""

    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def labels(self) -> Tensor:
        return self.targets

    def read(self, indices: Sequence[int]) -> list[Image.Image | Exception]:
        return read_each(self.image, indices)

    def image(self, index: int) -> Image.Image:
        raise NotImplementedError


def to_rgb(image: Image.Image) -> Image.Image:
    """Drop transparency without blending; 16-bit images are narrowed by Pillow's own rule."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colors; a direct conversion to RGB warns about each such file
    return image.convert("RGB")


def decode(content: bytes) -> Image.Image:
    """The image in the bytes of an encoded file."""
    if not content:
        raise ValueError("the file is empty")
    if (jpeg := decode_jpeg(content)) is not None:
        return jpeg
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode != "RGB":
                return to_rgb(image)
            image.load()
            return image  # `convert` would copy it
    except UnidentifiedImageError:
        raise ValueError(f"not an image in a format that Pillow knows ({len(content)} bytes)") from None


def from_array(pixels: NDArray[np.generic]) -> Image.Image:
    """An image from (H, W), (H, W, 1 or 3) or (1 or 3, H, W), either uint8 or float in [0, 1] rounded to 8 bits."""
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype != np.uint8:
        values = pixels.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise ValueError(f"float pixels must be in [0, 1], got {low:.4g} to {high:.4g}")
        pixels = np.floor(values * 255 + 0.5).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))


def read_each(read: Callable[[Item], Image.Image], items: Iterable[Item]) -> list[Image.Image | Exception]:
    """Read each item; a failure gives its exception in place of the image.

    Decoders fail on damaged bytes in many ways (OSError, SyntaxError, struct.error, MemoryError, ...). One bad sample
    must not end a run over thousands, so all are caught here; `read_batches` decides what to do with them.
    """
    results: list[Image.Image | Exception] = []
    for item in items:
        try:
            results.append(read(item))
        except UserError:
            raise  # not the sample's fault, e.g. no room for temporary files
        except Exception as fault:
            results.append(fault)
    return results
