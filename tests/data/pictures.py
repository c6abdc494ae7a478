"""Small pictures whose pixels a test knows, and the files they are put into."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


def picture(number: int, height: int = 6, width: int = 5) -> Pixels:
    """Noise that differs from number to number, (height, width, 3)."""
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(pixels: Pixels) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_png(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(picture(number)))


def pixels_of(image: Image.Image | Exception) -> Pixels:
    assert isinstance(image, Image.Image), f"expected a picture, got {image!r}"
    assert image.mode == "RGB"
    return np.asarray(image)
