"""The perturbation sequences of ImageNet-P and CIFAR-P (Hendrycks & Dietterich, ICLR 2019, arXiv:1903.12261).

In a sequence one image changes a little from frame to frame. Geometric sequences move the whole image and then crop its
center, so that small motions show no black border at ImageNet's size; CIFAR's images are not cropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitadel.corruptions.apply import as_bytes, as_floats, check_images, sample_streams
from vitadel.corruptions.filtering import FLOAT32_SLACK, blur_by_taps, motion_taps, smooth, to_bytes
from vitadel.corruptions.noise import gaussian_noise, shot_noise, speckle_noise
from vitadel.corruptions.randomness import normal_field
from vitadel.corruptions.spatter import add_water, liquid
from vitadel.corruptions.weather import add_snow, brightness, flakes
from vitadel.errors import UserError, check_known
from vitadel.runtime.rng import SampleRNG

IMAGENET_SEQUENCES = (
    *("gaussian_noise", "shot_noise", "motion_blur", "zoom_blur"),
    *("snow", "brightness", "translate", "rotate", "tilt", "scale"),
)
"""The 10 sequences that mFR averages, in the order of the benchmark."""

CIFAR_SEQUENCES = tuple("spatter" if name == "snow" else name for name in IMAGENET_SEQUENCES)
"""CIFAR-P has spatter where ImageNet-P has snow."""

VALIDATION_SEQUENCES = ("speckle_noise", "gaussian_blur", "spatter", "shear")

NOISE_SEQUENCES = ("gaussian_noise", "shot_noise", "speckle_noise")
"""Unordered frames: a clean one, and noisy ones to compare with it rather than with each other."""

FRAMES = 31
SMALL = 48  # images with a shorter side up to this are treated as CIFAR's


@dataclass(frozen=True)
class Motion:
    """What differs between ImageNet-P and CIFAR-P."""

    kept: float  # fraction of the shorter side that the crop keeps
    noise: tuple[float, float, float]  # one per difficulty
    photons: tuple[float, float, float]
    speckle: tuple[float, float, float]
    ray: tuple[int, float, float, float]  # frames, radius, sigma, degrees per frame
    snow: tuple[float, float, float]  # zoom, radius, sigma
    brighter: float  # per frame
    shifts: range
    tilt: float  # degrees per frame
    scale: tuple[float, float]  # first, per frame
    sigma: tuple[float, float, float]  # first, per frame, kernel length in sigmas
    wet: tuple[float, float, float, float]  # mean and deviation of the noise, its smoothing, threshold
    drip: tuple[float, ...]  # weights of water running down, from the pixel below to those above


IMAGENET_MOTION = Motion(
    kept=224 / 256,
    noise=(0.03, 0.05, 0.08),
    photons=(300, 120, 60),
    speckle=(0.05, 0.10, 0.15),
    ray=(31, 10, 3, 4),
    snow=(3, 14, 4),
    brighter=0.02,
    shifts=range(-20, 21),
    tilt=1.0,
    scale=(0.40, 0.025),
    sigma=(0.25, 0.035, 6),
    wet=(0.65, 0.27, 3.7, 0.69),
    drip=(0.05, 0.1, 0.15, 0.7),
)
CIFAR_MOTION = Motion(
    kept=1.0,
    noise=(0.02, 0.04, 0.06),
    photons=(700, 400, 200),
    speckle=(0.05, 0.07, 0.10),
    ray=(21, 6, 1.8, 9),
    snow=(2, 10, 2),
    brighter=0.015,
    shifts=range(-7, 9),
    tilt=0.75,
    scale=(0.70, 0.02),
    sigma=(0.3, 0.015, 7),
    wet=(0.6, 0.265, 1.75, 0.7),
    drip=(0.0, 0.2, 0.8),
)


@dataclass(frozen=True)
class _Batch:
    """A batch of whole 8-bit images, their crop window, and the parameters of motion."""

    whole: Tensor
    window: tuple[slice, slice]
    rng: SampleRNG
    difficulty: int
    motion: Motion

    @property
    def crop(self) -> Tensor:
        return self.whole[:, :, self.window[0], self.window[1]].contiguous()


def sequence(x: Tensor, name: str, rng: SampleRNG | None = None, difficulty: int = 1) -> Tensor:
    """The frames (frames, n, 3, ...) of images (n, 3, height, width); values are whole levels k / 255.

    Images with a shorter side above 48 pixels are treated as ImageNet's: give them at 256 pixels, the frames are the
    central 224 (7/8 of the shorter side at other sizes). Smaller ones are treated as CIFAR's and not cropped.
    `difficulty` 1, 2 or 3 sets the strength of noise; other sequences do not depend on it, and are made harder by
    comparing frames that far apart.
    """
    check_images(x)
    check_known("sequence", name, _SEQUENCES)
    if isinstance(difficulty, bool) or difficulty not in (1, 2, 3):
        raise UserError(f"the difficulty of a sequence is 1, 2 or 3, got {difficulty!r}")
    if min(x.shape[2:]) < 8:
        raise UserError(f"sequences need images of at least 8 pixels on both sides, got {x.shape[2]} x {x.shape[3]}")
    motion = CIFAR_MOTION if min(x.shape[2:]) <= SMALL else IMAGENET_MOTION
    side = round(min(x.shape[2:]) * motion.kept)
    lengths = x.shape[2:] if motion.kept == 1 else (side, side)
    starts = [round((have - keep) / 2) for have, keep in zip(x.shape[2:], lengths, strict=True)]
    window = slice(starts[0], starts[0] + lengths[0]), slice(starts[1], starts[1] + lengths[1])
    stream = sample_streams(x, rng).stream("sequence " + name, difficulty)
    frames = _SEQUENCES[name](_Batch(as_bytes(x), window, stream, difficulty, motion))
    return as_floats(torch.stack(list(frames)), x)


def _add_noise(
    add: Callable[[Tensor, SampleRNG, float], Tensor], amounts: Callable[[Motion], Sequence[float]], batch: _Batch
) -> Iterator[Tensor]:
    yield batch.crop
    for frame in range(1, FRAMES):
        yield add(batch.crop, batch.rng.stream("frame", frame), amounts(batch.motion)[batch.difficulty - 1])


def _blur_along(planes: Tensor, radius: float, sigma: float, angle: float) -> Tensor:
    taps = motion_taps(radius, sigma, angle, *planes.shape[2:])
    return blur_by_taps(planes.flatten(0, 1), taps, nearest=True).view_as(planes)


def _motion_blur(batch: _Batch) -> Iterator[Tensor]:
    frames, radius, sigma, step = batch.motion.ray
    return (_blur_along(batch.crop, radius, sigma, (frame - frames + 1) * step) for frame in range(frames))


def _zoom_blur(batch: _Batch) -> Iterator[Tensor]:
    total = torch.zeros_like(batch.crop, dtype=torch.int32)
    for frame in range(FRAMES):
        total += _warp(batch, _about_center(batch, np.eye(2) / (1 + 0.004 * frame)))
        yield total.div(frame + 1, rounding_mode="floor").to(torch.uint8)


def _gaussian_blur(batch: _Batch) -> Iterator[Tensor]:
    first, step, truncate = batch.motion.sigma
    image = batch.crop.float()
    return (to_bytes(smooth(image, first + step * frame, truncate), FLOAT32_SLACK) for frame in range(FRAMES))


def _snow(batch: _Batch) -> Iterator[Tensor]:
    zoom, radius, sigma = batch.motion.snow
    image = batch.crop
    layer = flakes(batch.rng, (image.shape[2], image.shape[3]), 0.05, 0.3, zoom, 0.5)
    return (add_snow(image, _blur_along(layer, radius, sigma, 4 * frame - 150), 0.85) for frame in range(FRAMES))


def _brightness(batch: _Batch) -> Iterator[Tensor]:
    middle = FRAMES // 2
    return (brightness(batch.crop, batch.rng, (frame - middle) * batch.motion.brighter) for frame in range(FRAMES))


def _spatter(batch: _Batch) -> Iterator[Tensor]:
    loc, scale, sigma, threshold = batch.motion.wet
    image = batch.crop
    layer = liquid(normal_field(batch.rng, 1, *image.shape[2:]).mul_(scale).add_(loc), sigma, threshold)
    height = image.shape[2]
    above = len(batch.motion.drip) - 2
    for _ in range(FRAMES):
        yield add_water(image, layer, 0.6)
        padded = F.pad(layer, (0, 0, above, 1))
        layer = torch.zeros_like(layer)
        for row, weight in enumerate(reversed(batch.motion.drip)):
            layer.add_(padded[:, :, row : row + height], alpha=weight)


Matrix = NDArray[np.float64]


def _about_center(batch: _Batch, turn: Matrix, shift: int = 0) -> Matrix:
    """The map from pixel (x, y) of a frame to its origin, when `turn` acts about the center of the whole image."""
    height, width = batch.whole.shape[2:]
    center = np.array([(width - 1) / 2, (height - 1) / 2])
    back = np.eye(3)
    back[:2, :2] = turn
    back[:2, 2] = center - turn @ (center + np.array([shift, 0]))
    return back


def _warp(batch: _Batch, back: Matrix, fading: bool = False) -> Tensor:
    """Warp the image by the inverse map `back`, bilinearly and black outside, and crop the window.

    Images end at the outer edge of their last pixels and values are truncated to 8 bits, as in Pillow; with `fading`
    they fade to black beyond the last pixel centers and values are rounded, as in OpenCV.
    """
    height, width = batch.whole.shape[2:]
    y, x = torch.meshgrid(
        *(torch.arange(side.start, side.stop, dtype=torch.float64) for side in batch.window), indexing="ij"
    )
    depth = back[2, 0] * x + back[2, 1] * y + back[2, 2]
    from_x = (back[0, 0] * x + back[0, 1] * y + back[0, 2]) / depth
    from_y = (back[1, 0] * x + back[1, 1] * y + back[1, 2]) / depth
    grid = torch.stack((from_x * 2 / (width - 1) - 1, from_y * 2 / (height - 1) - 1), dim=-1)
    grid = grid.expand(len(batch.whole), *grid.shape)
    # In float64: an error of a millionth of a pixel can change a level.
    image = F.grid_sample(batch.whole.double(), grid, padding_mode="zeros" if fading else "border", align_corners=True)
    if fading:
        return image.round_().to(torch.uint8)
    inside = (from_x >= -0.5) & (from_x < width - 0.5) & (from_y >= -0.5) & (from_y < height - 0.5)
    return to_bytes(image.mul_(inside), FLOAT32_SLACK)


def _translate(batch: _Batch) -> Iterator[Tensor]:
    return (_warp(batch, _about_center(batch, np.eye(2), shift)) for shift in batch.motion.shifts)


def _degrees(step: float = 1.0) -> Iterator[float]:
    return (math.radians(step * (frame - FRAMES // 2)) for frame in range(FRAMES))


def _rotate(batch: _Batch) -> Iterator[Tensor]:
    for angle in _degrees():
        turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
        yield _warp(batch, _about_center(batch, turn))


def _shear(batch: _Batch) -> Iterator[Tensor]:
    return (_warp(batch, _about_center(batch, np.array([[1, math.tan(angle)], [0, 1]]))) for angle in _degrees())


def _scale(batch: _Batch) -> Iterator[Tensor]:
    first, step = batch.motion.scale
    return (_warp(batch, _about_center(batch, np.eye(2) / (first + step * frame))) for frame in range(FRAMES))


def _tilt(batch: _Batch) -> Iterator[Tensor]:
    """Rotate the image in space by the same angle about both axes, seen from a distance of its diagonal."""
    height, width = batch.whole.shape[2:]
    focal = math.hypot(height, width)
    for angle in _degrees(batch.motion.tilt):
        cos, sin = math.cos(angle), math.sin(angle)
        about_x = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
        about_y = np.array([[cos, 0, -sin], [0, 1, 0], [sin, 0, cos]])
        # The image plane is at depth 1: where its axes and its center go in space.
        placed = about_x @ about_y @ np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1]])
        placed[2, 2] += focal
        camera = np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1]])
        yield _warp(batch, np.linalg.inv(camera @ placed), fading=True)


_SEQUENCES: dict[str, Callable[[_Batch], Iterator[Tensor]]] = {
    "gaussian_noise": partial(_add_noise, gaussian_noise, attrgetter("noise")),
    "shot_noise": partial(_add_noise, shot_noise, attrgetter("photons")),
    "motion_blur": _motion_blur,
    "zoom_blur": _zoom_blur,
    "snow": _snow,
    "brightness": _brightness,
    "translate": _translate,
    "rotate": _rotate,
    "tilt": _tilt,
    "scale": _scale,
    "speckle_noise": partial(_add_noise, speckle_noise, attrgetter("speckle")),
    "gaussian_blur": _gaussian_blur,
    "spatter": _spatter,
    "shear": _shear,
}
