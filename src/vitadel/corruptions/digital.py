"""Digital: contrast, elastic transform, pixelation, JPEG and saturation, on 8-bit images (n, 3, height, width)."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torchvision.io import ImageReadMode

from vitadel.corruptions.color import hue_saturation_value, of_hue_saturation_value
from vitadel.corruptions.filtering import FLOAT32_SLACK, smoothing_matrix, to_bytes
from vitadel.corruptions.randomness import uniform_field
from vitadel.runtime.rng import SampleRNG

_TRUNCATE = 3.0  # displacements are smoothed with a shorter kernel than images
_FIXED_BITS = 22  # of Pillow's averages
_FIXED_POINT = 1 << _FIXED_BITS


def contrast(pixels: Tensor, rng: SampleRNG, factor: float) -> Tensor:
    """Move pixels towards the mean of each channel of each image."""
    mean = pixels.sum((2, 3), keepdim=True).double().div_(255 * pixels[0, 0].numel())
    return to_bytes(pixels.double().div_(255).sub_(mean).mul_(factor).add_(mean).mul_(255))


def saturate(pixels: Tensor, rng: SampleRNG, factor: float, offset: float) -> Tensor:
    """Scale and shift the S of HSV."""
    color = hue_saturation_value(pixels)
    saturation = (color.saturation * factor).add_(offset).clamp_(0, 1)
    return of_hue_saturation_value(replace(color, saturation=saturation))


def pixelate(pixels: Tensor, rng: SampleRNG, factor: float) -> Tensor:
    """Shrink by averaging, then enlarge by repetition."""
    rows, columns = (_cells(length, max(1, int(length * factor))) for length in pixels.shape[2:])
    # Picking whole rows is fast, so columns are transposed and back. Columns first: Pillow rounds after each side.
    narrow = _averages(pixels.numpy().swapaxes(2, 3), columns)
    small = _averages(narrow.swapaxes(2, 3), rows)
    wide = np.ascontiguousarray(small.swapaxes(2, 3)).take(columns.shown, 2)
    return torch.from_numpy(np.ascontiguousarray(wide.swapaxes(2, 3)).take(rows.shown, 2))


@dataclass(frozen=True)
class _Cells:
    """How a line is divided into cells. `members`: the first pixels of all cells, the second ones, ...; cells with
    fewer pixels point behind the end. `shares`: the weight of a pixel; `shown`: the cell of each resulting pixel."""

    members: tuple[NDArray[np.int64], ...]
    shares: NDArray[np.int32]
    shown: NDArray[np.int64]


@lru_cache(maxsize=64)
def _cells(length: int, kept: int) -> _Cells:
    """Divide a line as Pillow does, by asking Pillow: its float arithmetic decides on pixels at cell borders."""
    line = Image.fromarray(np.eye(length, dtype=np.float32)).resize((kept, length), Image.Resampling.BOX)
    inside = np.asarray(line).T > 0
    starts, counts = inside.argmax(1), inside.sum(1)
    members = tuple(np.where(step < counts, starts + step, length) for step in range(int(counts.max())))
    numbers = Image.fromarray(np.arange(kept, dtype=np.int32)[None]).resize((length, 1), Image.Resampling.NEAREST)
    shares = np.floor(_FIXED_POINT / counts + 0.5).astype(np.int32)
    return _Cells(members, shares[:, None], np.asarray(numbers)[0].astype(np.int64))


def _averages(planes: NDArray[np.uint8], cells: _Cells) -> NDArray[np.uint8]:
    """The mean of each cell along the rows of planes (n, c, rows, columns), in Pillow's integer arithmetic."""
    n, channels, length, width = planes.shape
    padded = np.empty((n, channels, length + 1, width), np.int32)
    padded[:, :, :length] = np.ascontiguousarray(planes)  # transposing bytes is cheaper
    padded[:, :, length] = 0
    total = padded.take(cells.members[0], 2)
    for more in cells.members[1:]:
        total += padded.take(more, 2)
    total *= cells.shares
    total += _FIXED_POINT // 2
    total >>= _FIXED_BITS
    return total.astype(np.uint8)


def jpeg_compression(pixels: Tensor, rng: SampleRNG, quality: float) -> Tensor:
    """Encode and decode as JPEG with colors at half the resolution."""
    # torchvision's codec gives the same bytes at half the cost of Pillow's, but it will be removed from torchvision.
    through_file = _through_torchvision if hasattr(torch.ops.image, "encode_jpeg") else _through_pillow
    interleaved = pixels.permute(0, 2, 3, 1).contiguous().numpy()
    images = [through_file(image, int(quality)) for image in interleaved]
    together = np.stack(images) if len(images) > 1 else images[0][None]  # saves a copy of large images
    return torch.from_numpy(together).permute(0, 3, 1, 2)


def _through_torchvision(image: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    file = torch.ops.image.encode_jpeg(torch.from_numpy(image).permute(2, 0, 1), quality)
    decoded: Tensor = torch.ops.image.decode_jpeg(file, ImageReadMode.UNCHANGED.value, False)
    return decoded.permute(1, 2, 0).numpy()


def _through_pillow(image: NDArray[np.uint8], quality: int) -> NDArray[np.uint8]:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file, formats=("JPEG",)))


def elastic_transform(pixels: Tensor, rng: SampleRNG, alpha: float, sigma: float, jitter: float) -> Tensor:
    """A random affine map of the image, then smooth random displacements of its pixels."""
    height, width = pixels.shape[2:]
    corners = rng.stream("affine").uniform(3, 2).double().mul_(2).sub_(1).mul_(jitter)
    image = move_points(pixels.float(), corners)
    if alpha:
        image = displace(image, uniform_field(rng, 2, height, width).mul_(2).sub_(1), alpha, sigma)
    return to_bytes(image, FLOAT32_SLACK)


def move_points(image: Tensor, moves: Tensor) -> Tensor:
    """The affine map that moves three points around the center by `moves` (n, 3, (right, down)); mirrored edges."""
    height, width = image.shape[2:]
    arm = min(height, width) // 3
    middle = torch.tensor([width // 2, height // 2], dtype=torch.float64)
    before = middle + arm * torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64)
    ones = torch.ones(len(moves), 3, 1, dtype=torch.float64)
    # Rows (x, y, 1) of the moved points times this matrix are the original points: the origin of each pixel.
    back = torch.linalg.solve(torch.cat((before + moves, ones), 2), before.expand(len(moves), 3, 2))
    x = torch.arange(width, dtype=torch.float64)
    y = torch.arange(height, dtype=torch.float64)[:, None]
    from_x, from_y = (
        (back[:, 0, axis, None, None] * x + back[:, 1, axis, None, None] * y + back[:, 2, axis, None, None])
        for axis in (0, 1)
    )
    grid = torch.stack((from_x * (2 / (width - 1)) - 1, from_y * (2 / (height - 1)) - 1), dim=-1)
    return F.grid_sample(image, grid.float(), padding_mode="reflection", align_corners=True)


def displace(image: Tensor, noise: Tensor, alpha: float, sigma: float) -> Tensor:
    """Displace pixels by `alpha` times the smoothed `noise` (n, (right, down), height, width); mirrored edges."""
    height, width = image.shape[2:]
    down, across = smoothing_matrix(height, sigma, _TRUNCATE), smoothing_matrix(width, sigma, _TRUNCATE).T.contiguous()
    # Image by image: rounding of a batched product may depend on the batch size.
    moves = torch.stack([down @ field.clone() @ across for field in noise.flatten(0, 1)]).view_as(noise).mul_(alpha)
    x = torch.arange(width, dtype=torch.float32)
    y = torch.arange(height, dtype=torch.float32)[:, None]
    grid = torch.stack(((2 * (moves[:, 0] + x) + 1) / width - 1, (2 * (moves[:, 1] + y) + 1) / height - 1), dim=-1)
    return F.grid_sample(image, grid, padding_mode="reflection", align_corners=False)
