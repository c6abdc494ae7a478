"""The benchmark's photos of frost, from the package `imagecorruptions-imaug`; of their files only, not of its code."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitadel.errors import UserError

__all__ = ["PHOTOS", "frost_photo"]

PHOTOS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""There is a sixth, which the benchmark never draws."""


def _folder() -> Path:
    found = importlib.util.find_spec("imagecorruptions")  # finds the package without running it: it needs OpenCV
    folders = [Path(place) / "frost" for place in (found.submodule_search_locations or ())] if found else []
    for folder in folders:
        if all((folder / name).is_file() for name in PHOTOS):
            return folder
    raise UserError(
        "the corruption 'frost' needs the benchmark's photos of frost, which are not installed. They come with the "
        "package imagecorruptions-imaug: pip install 'vitadel[frost]', or pip install imagecorruptions-imaug. "
        "All other corruptions work without it."
    )


@lru_cache(maxsize=len(PHOTOS))
def _original(name: str) -> Tensor:
    with Image.open(_folder() / name) as photo:
        return torch.from_numpy(np.array(photo.convert("RGB"))).permute(2, 0, 1)


@lru_cache(maxsize=4 * len(PHOTOS))
def frost_photo(name: str, scale: float, height: int, width: int) -> Tensor:
    """A photo as 8 bits (3, ...), at `scale` or larger if it would not be larger than an image of this size."""
    photo = _original(name)
    scale = max(scale, (height + 1) / photo.shape[1], (width + 1) / photo.shape[2])
    if scale == 1:
        return photo
    # Bilinear without smoothing: photos made smaller are jagged in the benchmark.
    size = [round(length * scale) for length in photo.shape[1:]]
    rows, columns = (_places(length, scale) for length in size)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], dim=-1)
    span = torch.tensor([photo.shape[2] - 1, photo.shape[1] - 1])
    resized = F.grid_sample(
        photo[None].double(), (2 * grid / span - 1)[None], padding_mode="border", align_corners=True
    )
    return resized[0].round_().to(torch.uint8)


def _places(length: int, scale: float) -> Tensor:
    """Where the centres of the pixels of the scaled photo lie in the original."""
    return (torch.arange(length, dtype=torch.float64) + 0.5) / scale - 0.5
