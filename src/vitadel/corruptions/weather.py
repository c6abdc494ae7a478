"""Weather: snow, frost, fog and brightness, on 8-bit images (n, 3, height, width).

The benchmark's photos of frost come from the files of the package `imagecorruptions-imaug`; its code is not used.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitadel.corruptions.color import hue_saturation_value, of_hue_saturation_value
from vitadel.corruptions.filtering import blur_along, to_bytes, zoom_and_crop, zoom_crop
from vitadel.corruptions.randomness import between, normal_field, uniform_field
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

_WIBBLE = 100.0


def snow(
    pixels: Tensor,
    rng: SampleRNG,
    loc: float,
    scale: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    mix: float,
) -> Tensor:
    """Add flakes, made of enlarged noise above a threshold and blurred along a ray, to a paler image."""
    layer = flakes(rng, (pixels.shape[2], pixels.shape[3]), loc, scale, zoom, threshold)
    angles = between(rng.stream("angle"), -135, -45)
    return add_snow(pixels, blur_along(layer, angles, radius, sigma, nearest=True), mix)


def flakes(rng: SampleRNG, size: tuple[int, int], loc: float, scale: float, zoom: float, threshold: float) -> Tensor:
    """Flakes before the motion blur, 8 bits, (n, 1, height, width)."""
    rows, columns = zoom_crop(size, zoom)
    # Only the part of the noise that is enlarged is drawn.
    noise = normal_field(rng, 1, rows.stop - rows.start, columns.stop - columns.start).mul_(scale).add_(loc)
    layer = zoom_and_crop(noise.double(), zoom, size)
    return to_bytes(torch.where(layer < threshold, 0.0, layer).mul_(255))


def add_snow(pixels: Tensor, fallen: Tensor, mix: float) -> Tensor:
    """Mix the image with a paler version of itself, and add the flakes and the flakes rotated by 180 degrees."""
    image = pixels.float()
    red, green, blue = image.unbind(1)
    gray = (0.299 * red).add_(green, alpha=0.587).add_(blue, alpha=0.114).mul_(1.5).add_(127.5)[:, None]
    pale = torch.maximum(image, gray).mul_(1 - mix)
    drifts = fallen.float()
    return to_bytes(image.mul_(mix).add_(pale).add_(drifts.add(drifts.flip(2, 3))))


def frost(pixels: Tensor, rng: SampleRNG, keep: float, lay: float, scale: float) -> Tensor:
    """Add a random crop of one of five photos of frost."""
    height, width = pixels.shape[2:]
    choice = rng.integers(len(PHOTOS), 1)[:, 0].tolist()
    place = rng.stream("place").uniform(2).double()
    pieces = []
    for photo, (down, right) in zip(choice, place.tolist(), strict=True):
        ice = frost_photo(PHOTOS[photo], scale, height, width)
        top, left = int(down * (ice.shape[1] - height)), int(right * (ice.shape[2] - width))
        pieces.append(ice[:, top : top + height, left : left + width])
    ice = torch.stack(pieces).double().mul_(lay)
    return to_bytes(pixels.double().mul_(keep).add_(ice))


def fog(pixels: Tensor, rng: SampleRNG, weight: float, decay: float) -> Tensor:
    """Add plasma noise, then darken so that the brightest value cannot grow."""
    height, width = pixels.shape[2:]
    size = 1 << (max(height, width, 2) - 1).bit_length()
    field = plasma(uniform_field(rng, size * size - 1).mul_(2).sub_(1), size, decay)[:, None, :height, :width]
    brightest = pixels.amax((1, 2, 3), keepdim=True).double().div_(255)
    share = (brightest / (brightest + weight)).float()
    return to_bytes(pixels.float().add_(field.mul_(255 * weight)).mul_(share))


def plasma(chances: Tensor, size: int, decay: float) -> Tensor:
    """Diamond-square (Fournier, Fussell & Carpenter 1982) on a torus, scaled to [0, 1]; chances in [-1, 1] per cell.

    The noise of a level is the square of its `_WIBBLE`, which shrinks by `decay`: a mistake of the benchmark, kept.
    """
    field = torch.zeros(len(chances), size, size, dtype=chances.dtype)
    wibble, used, step = _WIBBLE, 0, size

    def wobbled(total: Tensor) -> Tensor:
        nonlocal used
        fresh = chances[:, used : used + total[0].numel()].view_as(total)
        used += total[0].numel()
        return total.div_(4).add_(fresh, alpha=wibble * wibble)

    while step >= 2:
        half = step // 2
        corners, centers = field[:, ::step, ::step], field[:, half::step, half::step]
        beside = corners + corners.roll(-1, 1)
        centers.copy_(wobbled(beside + beside.roll(-1, 2)))
        field[:, ::step, half::step] = wobbled(centers + centers.roll(1, 1) + (corners + corners.roll(-1, 2)))
        field[:, half::step, ::step] = wobbled(centers + centers.roll(1, 2) + (corners + corners.roll(-1, 1)))
        step, wibble = half, wibble / decay
    field.sub_(field.amin((1, 2), keepdim=True))
    return field.div_(field.amax((1, 2), keepdim=True))


def brightness(pixels: Tensor, rng: SampleRNG, amount: float) -> Tensor:
    """Raise the V of HSV: the channels grow in proportion, and black turns gray."""
    color = hue_saturation_value(pixels)
    return of_hue_saturation_value(replace(color, value=color.value.add(amount).clamp_(0, 1)))


PHOTOS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The benchmark never uses the sixth photo."""


def _frost_folder() -> Path:
    found = importlib.util.find_spec("imagecorruptions")  # finds the package without importing it, which needs OpenCV
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
def _frost_original(name: str) -> Tensor:
    with Image.open(_frost_folder() / name) as photo:
        return torch.from_numpy(np.array(photo.convert("RGB"))).permute(2, 0, 1)


@lru_cache(maxsize=4 * len(PHOTOS))
def frost_photo(name: str, scale: float, height: int, width: int) -> Tensor:
    """A photo in 8 bits (3, ...), scaled by `scale`, or more if it must be larger than an image of this size."""
    photo = _frost_original(name)
    scale = max(scale, (height + 1) / photo.shape[1], (width + 1) / photo.shape[2])
    if scale == 1:
        return photo
    # Bilinear without antialiasing, as in the benchmark.
    size = [round(length * scale) for length in photo.shape[1:]]
    rows, columns = (_places(length, scale) for length in size)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], dim=-1)
    span = torch.tensor([photo.shape[2] - 1, photo.shape[1] - 1])
    resized = F.grid_sample(
        photo[None].double(), (2 * grid / span - 1)[None], padding_mode="border", align_corners=True
    )
    return resized[0].round_().to(torch.uint8)


def _places(length: int, scale: float) -> Tensor:
    """The positions of the scaled photo's pixel centers in the original."""
    return (torch.arange(length, dtype=torch.float64) + 0.5) / scale - 0.5
