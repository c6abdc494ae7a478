"""Patch-wise augmentation (Mao et al., CVPR 2022, arXiv:2105.07926): every patch of an image is varied by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.training.data_stream import Part
from vitadel.training.protocols import Training
from vitadel.training.recipes.ranges import AT_LEAST_ONE, NOT_NEGATIVE, SHARE, check_ranges

__all__ = ["PatchAugmentation", "augment_patches"]

_TWIN = 1 << 60  # where the names of varied images begin, so that attacks draw other numbers for them


@dataclass
class PatchAugmentation:
    """Every batch is learnt from as it is and with its patches varied, both with the same labels and weight.

    Each patch is, independently and with the probabilities `crop`, `noise` and `flip`: cut to a square of `scale` of
    its area and resized; given Gaussian noise of `noise_std`, in the units of the normalised image; mirrored. Batches
    get twice as large, and so does the work of a step, attacks included. The released code drops the gradient of the
    varied images before it is used; here they count.
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

    def change_batch(self, run: Training, part: Part) -> Part:
        rng = SampleRNG.of_samples(run.seed, part.names, part.x.device).stream("patch augmentation", run.step)
        classifier = next((module for module in run.model.modules() if isinstance(module, Classifier)), None)
        varied = augment_patches(
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
            names=torch.cat([part.names, part.names + _TWIN]),
            x=torch.cat([part.x, varied]),
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
    """Images in [0, 1] with varied patches, inside the box; `noise_std` in pixel units, for all channels or for each.

    A patch's neighbours have no part in it: where a cut is resized, its margin is continued by its own last pixels.
    """
    rows, columns = _grid((x.shape[2], x.shape[3]), patch_size)
    split = x.unflatten(3, (columns, patch_size)).unflatten(2, (rows, patch_size)).permute(0, 2, 4, 1, 3, 5)
    patches = split.reshape(-1, x.shape[1], patch_size, patch_size)
    own = SampleRNG(rng.bits(rows * columns).flatten())  # a stream for every patch: most of them draw next to nothing
    cut, noisy, mirrored = (
        own.stream(name).uniform() < share for name, share in (("crop", crop), ("noise", noise), ("flip", flip))
    )
    patches = patches.index_put((cut,), _cut(patches[cut], own[cut], scale))
    size = noise_std.to(x) if isinstance(noise_std, Tensor) else noise_std
    added = own[noisy].stream("added").normal(*patches.shape[1:]).to(x)
    patches = patches.index_put((noisy,), patches[noisy] + size * added)
    patches = patches.index_put((mirrored,), patches[mirrored].flip(3))
    whole: Tensor = patches.view(split.shape).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
    return whole.clamp(0, 1)


def _cut(patches: Tensor, rng: SampleRNG, scale: tuple[float, float]) -> Tensor:
    """A random square of each patch, of a share of its area between the two of `scale`, at the size of the patch."""
    area = scale[0] + (scale[1] - scale[0]) * rng.stream("area").uniform()
    side = area.sqrt()[:, None]
    # In the coordinates of `grid_sample` a patch reaches from -1 to 1, so the middle of a square may move by 1 - side.
    middle = (1 - side) * (2 * rng.stream("place").uniform(2) - 1)
    size = patches.shape[-1]
    pixels = (2 * torch.arange(size, device=side.device) + 1) / size - 1
    across, down = (side * pixels + middle[:, axis, None] for axis in (0, 1))
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
