"""Digital: contrast, elastic transform, pixelation, JPEG and saturation, on 8-bit images (n, 3, height, width)."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vitadel.corruptions.colour import hue_saturation_value, of_hue_saturation_value
from vitadel.corruptions.filtering import FLOAT32_SLACK, bytes_below, smoother
from vitadel.corruptions.randomness import uniform_field
from vitadel.runtime.draws import Draws

__all__ = ["affine_points", "contrast", "displaced", "elastic_transform", "jpeg_compression", "pixelate", "saturate"]

_TRUNCATE = 3.0  # displacements are smoothed with a shorter kernel than pictures


def contrast(pixels: Tensor, draws: Draws, factor: float) -> Tensor:
    """Towards the mean of each channel of each image."""
    mean = pixels.sum((2, 3), keepdim=True).double().div_(255 * pixels[0, 0].numel())
    return bytes_below(pixels.double().div_(255).sub_(mean).mul_(factor).add_(mean).mul_(255))


def saturate(pixels: Tensor, draws: Draws, factor: float, offset: float) -> Tensor:
    """The S of HSV scaled and shifted."""
    colour = hue_saturation_value(pixels)
    saturation = (colour.saturation * factor).add_(offset).clamp_(0, 1)
    return of_hue_saturation_value(replace(colour, saturation=saturation))


def pixelate(pixels: Tensor, draws: Draws, factor: float) -> Tensor:
    """Made smaller by averaging, then larger by repetition."""
    height, width = pixels.shape[2:]
    small = (max(1, int(width * factor)), max(1, int(height * factor)))
    return _pictures(
        pixels,
        lambda picture: picture.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.NEAREST),
    )


def jpeg_compression(pixels: Tensor, draws: Draws, quality: float) -> Tensor:
    """Through a JPEG file with colours at half the resolution."""

    def through_file(picture: Image.Image) -> Image.Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        return Image.open(file, formats=("JPEG",))

    return _pictures(pixels, through_file)


def _pictures(pixels: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Each image as a picture of Pillow, changed by it."""
    n, channels, height, width = pixels.shape
    woven = np.empty((n, height, width, channels), np.uint8)
    for channel in range(channels):
        woven[..., channel] = pixels[:, channel].numpy()
    for picture in woven:
        picture[:] = np.asarray(change(Image.fromarray(picture)))
    return torch.from_numpy(woven).permute(0, 3, 1, 2).contiguous()


def elastic_transform(pixels: Tensor, draws: Draws, alpha: float, sigma: float, jitter: float) -> Tensor:
    """A random affine map of the whole, then smooth random displacements of the pixels."""
    height, width = pixels.shape[2:]
    corners = draws.stream("affine").uniform(3, 2).double().mul_(2).sub_(1).mul_(jitter)
    image = affine_points(pixels.float(), corners)
    if alpha:
        image = displaced(image, uniform_field(draws, 2, height, width).mul_(2).sub_(1), alpha, sigma)
    return bytes_below(image, FLOAT32_SLACK)


def affine_points(image: Tensor, moves: Tensor) -> Tensor:
    """The affine map that moves three points around the centre by `moves` (n, 3, (right, down)); edges mirrored."""
    height, width = image.shape[2:]
    arm = min(height, width) // 3
    middle = torch.tensor([width // 2, height // 2], dtype=torch.float64)
    before = middle + arm * torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64)
    ones = torch.ones(len(moves), 3, 1, dtype=torch.float64)
    # Rows (x, y, 1) of the moved points times the map are the points as they were: where a pixel comes from.
    back = torch.linalg.solve(torch.cat((before + moves, ones), 2), before.expand(len(moves), 3, 2))
    x = torch.arange(width, dtype=torch.float64)
    y = torch.arange(height, dtype=torch.float64)[:, None]
    from_x, from_y = (
        (back[:, 0, axis, None, None] * x + back[:, 1, axis, None, None] * y + back[:, 2, axis, None, None])
        for axis in (0, 1)
    )
    grid = torch.stack((from_x * (2 / (width - 1)) - 1, from_y * (2 / (height - 1)) - 1), dim=-1)
    return F.grid_sample(image, grid.float(), padding_mode="reflection", align_corners=True)


def displaced(image: Tensor, noise: Tensor, alpha: float, sigma: float) -> Tensor:
    """Every pixel from `alpha` times the smoothed `noise` (n, (right, down), height, width) away; edges mirrored."""
    height, width = image.shape[2:]
    down, across = smoother(height, sigma, _TRUNCATE), smoother(width, sigma, _TRUNCATE).T.contiguous()
    # Image by image: a product of the whole batch may round differently for batches of different sizes.
    moves = torch.stack([down @ field.clone() @ across for field in noise.flatten(0, 1)]).view_as(noise).mul_(alpha)
    x = torch.arange(width, dtype=torch.float32)
    y = torch.arange(height, dtype=torch.float32)[:, None]
    grid = torch.stack(((2 * (moves[:, 0] + x) + 1) / width - 1, (2 * (moves[:, 1] + y) + 1) / height - 1), dim=-1)
    return F.grid_sample(image, grid, padding_mode="reflection", align_corners=False)
