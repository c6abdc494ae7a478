"""From bytes to an RGB picture, the way timm's readers do it: `convert("RGB")` and no turning by EXIF."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitadel.errors import UserError

__all__ = ["IMAGE_EXTENSIONS", "attempts", "decode", "from_array", "load", "to_rgb"]

IMAGE_EXTENSIONS = frozenset(["bmp", "jpeg", "jpg", "pbm", "pgm", "png", "pnm", "ppm", "tif", "tiff", "webp"])

Item = TypeVar("Item")


def to_rgb(image: Image.Image) -> Image.Image:
    """Transparency is dropped, not blended, and a 16-bit picture is narrowed by Pillow's own rule."""
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours; straight to RGB, Pillow warns about each such file
    return image.convert("RGB")


def decode(content: bytes) -> Image.Image:
    """The picture in an encoded file's bytes."""
    if not content:
        raise ValueError("the file is empty")
    try:
        with Image.open(io.BytesIO(content)) as image:
            return to_rgb(image)
    except UnidentifiedImageError:
        raise ValueError(f"not a picture in a format that Pillow knows ({len(content)} bytes)") from None


def load(path: Path) -> Image.Image:
    """The picture in a file."""
    return decode(path.read_bytes())


def from_array(pixels: NDArray[np.generic]) -> Image.Image:
    """A picture from (H, W), (H, W, 1 or 3) or (1 or 3, H, W), either uint8 or float in [0, 1] rounded to 8 bits."""
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.dtype != np.uint8:
        values = pixels.astype(np.float64)
        low, high = float(values.min()), float(values.max())
        if not (low >= 0 and high <= 1):  # also true for NaN
            raise ValueError(f"float pixels must be in [0, 1], these run from {low:.4g} to {high:.4g}")
        pixels = np.floor(values * 255 + 0.5).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    return to_rgb(Image.fromarray(np.ascontiguousarray(pixels)))


def attempts(read: Callable[[Item], Image.Image], items: Iterable[Item]) -> list[Image.Image | Exception]:
    """Each item read; where that fails, for whatever reason, the exception stands in its place.

    Decoders meet hostile bytes and fail in many ways (OSError, SyntaxError, struct.error, MemoryError, ...). One bad
    sample must not end a run over thousands, so nothing is let through here; `batches` decides what becomes of it.
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
