"""Patch-wise augmentation (Mao et al., CVPR 2022, arXiv:2105.07926): every patch is augmented independently."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.quantities import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, check_ranges
from vitadel.runtime.rng import SampleRNG
from vitadel.training.data_stream import MicroBatch
from vitadel.training.interfaces import Training

_AUGMENTED = 1 << 60  # offset of the names of augmented images, so that attacks draw other numbers for them


@dataclass
class PatchAugmentation:
    """Adds to every batch a copy of its images with augmented patches, with the same labels and weight.

    Each patch is, independently and with the probabilities `crop`, `noise` and `flip`: cropped to a square of `scale`
    of its area and resized; given Gaussian noise of `noise_std`, in units of the normalized image; flipped. Batches are
    twice as large, and so is the cost of a step, attacks included. The released code discards the gradients of the
    augmented images; here they count.
    """

    patch_size: int = 16
    crop: float = 0.1
    noise: float = 0.1
    flip: float = 0.1
    scale: tuple[float, float] = (0.85, 1.0)
    noise_std: float = 0.01

    def __post_init__(self) -> None:
        shares = dict.fromkeys(("crop", "noise", "flip", "scale"), SHARE)
        check_ranges(self, **shares, patch_size=AT_LEAST_ONE, noise_std=NOT_NEGATIVE)
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UserError(
                f"scale must be two shares of a patch's area, the smaller one first, got {list(self.scale)}"
            )

    def check_model(self, model: Classifier) -> None:
        if model.record.input_size is not None:
            _grid(model.record.input_size, self.patch_size)

    def change_batch(self, run: Training, part: MicroBatch) -> MicroBatch:
        rng = SampleRNG.of_samples(run.seed, part.names, part.x.device).stream("patch augmentation", run.step)
        classifier = next((module for module in run.model.modules() if isinstance(module, Classifier)), None)
        augmented = augment_patches(
            part.x,
            rng,
            self.patch_size,
            crop=self.crop,
            noise=self.noise,
            flip=self.flip,
            scale=self.scale,
            noise_std=self.noise_std * (1.0 if classifier is None else classifier.std),
        )
        return replace(
            part,
            names=torch.cat([part.names, part.names + _AUGMENTED]),
            x=torch.cat([part.x, augmented]),
            y=torch.cat([part.y, part.y]),
        )


def augment_patches(
    x: Tensor,
    rng: SampleRNG,
    patch_size: int = 16,
    *,
    crop: float = 0.1,
    noise: float = 0.1,
    flip: float = 0.1,
    scale: tuple[float, float] = (0.85, 1.0),
    noise_std: float | Tensor = 0.01,
) -> Tensor:
    """Images in [0, 1] with augmented patches; `noise_std` in pixel units, for all channels or for each.

    Patches do not mix: a resized crop is padded with its own border pixels.
    """
    rows, columns = _grid((x.shape[2], x.shape[3]), patch_size)
    split = x.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size)).permute(0, 2, 4, 1, 3, 5)
    patches = split.reshape(-1, x.shape[1], patch_size, patch_size)
    own = SampleRNG(rng.bits(rows * columns).flatten())  # one stream per patch, as most patches need few numbers
    cut, noisy, flipped = (
        own.stream(name).uniform() < share for name, share in (("crop", crop), ("noise", noise), ("flip", flip))
    )
    patches = patches.index_put((cut,), _crop(patches[cut], own[cut], scale))
    size = noise_std.to(x) if isinstance(noise_std, Tensor) else noise_std
    added = own[noisy].stream("added").normal(*patches.shape[1:]).to(x)
    patches = patches.index_put((noisy,), patches[noisy] + size * added)
    patches = patches.index_put((flipped,), patches[flipped].flip(3))
    whole: Tensor = patches.view(split.shape).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
    return whole.clamp(0, 1)


def _crop(patches: Tensor, rng: SampleRNG, scale: tuple[float, float]) -> Tensor:
    """A random square crop of each patch, of a share of its area within `scale`, resized to the patch."""
    area = scale[0] + (scale[1] - scale[0]) * rng.stream("area").uniform()
    side = area.sqrt()[:, None]
    # `grid_sample` coordinates of a patch are -1 to 1, so the center of a square may move by 1 - side.
    center = (1 - side) * (2 * rng.stream("place").uniform(2) - 1)
    size = patches.shape[-1]
    pixels = (2 * torch.arange(size, device=side.device) + 1) / size - 1
    across, down = (side * pixels + center[:, axis, None] for axis in (0, 1))
    grid = torch.stack([across[:, None].expand(-1, size, -1), down[:, :, None].expand(-1, -1, size)], dim=3)
    return F.grid_sample(patches, grid.to(patches), padding_mode="border", align_corners=False)


def _grid(size: tuple[int, int], patch_size: int) -> tuple[int, int]:
    """Rows and columns of patches in an image, (height, width)."""
    if size[0] % patch_size or size[1] % patch_size:
        both = math.gcd(*size)
        raise UserError(
            f"images of {size[0]} x {size[1]} pixels cannot be cut into patches of {patch_size} to augment; set "
            f"patch_size to that of the model, or to another divisor of {both}."
        )
    return size[0] // patch_size, size[1] // patch_size
