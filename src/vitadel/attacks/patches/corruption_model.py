"""AFAT's corruption model: a small network that learns which patches a classifier can least do without (CVPR 2023).

The attacker's half of adversarial feature alignment training: image in, mask out, trained against a classifier. It is
a few thousand weights, so it also serves as an attack on a frozen model, see `patch_corruption`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.patches.random_patches import normalisation_of, patches_in, pixel_mask, strongest
from vitadel.errors import UserError

__all__ = [
    "CorruptionModel",
    "alignment",
    "as_first_layer_sees",
    "corrupted",
    "keep_mask",
]


def as_first_layer_sees(model: nn.Module, x: Tensor) -> Tensor:
    """The images normalised as the model does it."""
    mean, std = normalisation_of(model)
    return (x - mean.to(x)) / std.to(x)


def keep_mask(scores: Tensor, count: int) -> Tensor:
    """1 where a patch is kept, 0 at the `count` lowest scores of each row; gradients pass straight through.

    By rank and not by a quantile: exactly `count` also for equal scores, and none for a count of 0.
    """
    hard = (~strongest(-scores.detach(), count)).to(scores.dtype)
    return hard + (scores - scores.detach())


def corrupted(x: Tensor, keep: Tensor, noise: Tensor, side: int) -> Tensor:
    """`x` with noise in place of the patches that are not kept, (batch, patches); differentiable in `keep`."""
    mask = pixel_mask(keep, x, side).to(x.dtype)
    return mask * x + (1 - mask) * noise


def alignment(features: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """How far apart two lists of block outputs are: squared difference, mean over everything, then over blocks."""
    gaps = [F.mse_loss(ours, theirs) for ours, theirs in zip(features, others, strict=True)]
    return torch.stack(gaps).mean()


class CorruptionModel(nn.Module):
    """One score per patch: a convolution that sees one patch at a time, GELU, and a mixing of all patches.

    It takes images as the classifier's first layer sees them, i.e. normalised. Weights start as torch's own layers
    do, but from `generator`, so that making one leaves no trace on the global one.
    """

    def __init__(
        self, rows: int, columns: int, side: int, channels: int = 3, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.rows, self.columns, self.side = rows, columns, side
        source = torch.Generator().manual_seed(0) if generator is None else generator
        patches, pixels = rows * columns, channels * side**2
        self.look = nn.Parameter(_start((1, channels, side, side), pixels, source))
        self.mix = nn.Parameter(_start((patches, patches), patches, source))

    def forward(self, x: Tensor) -> Tensor:
        """Scores, (batch, patches) row by row; the lowest are the patches to corrupt."""
        rows, columns = patches_in(x, self.side)
        if (rows, columns) != (self.rows, self.columns):
            raise UserError(
                f"this corruption model was made for {self.rows} x {self.columns} patches of side {self.side}, and the "
                f"images of shape {tuple(x.shape)} have {rows} x {columns}; give images of one size, or train it anew"
            )
        # In half precision scores tie, and a tie would be broken by the place of a patch.
        with torch.autocast(x.device.type, enabled=False):
            seen = F.gelu(F.conv2d(x.to(self.look.dtype), self.look, stride=self.side))
            return F.linear(seen.flatten(1), self.mix)


def _start(shape: tuple[int, ...], inputs: int, source: torch.Generator) -> Tensor:
    bound = 1 / math.sqrt(inputs)
    return torch.empty(shape).uniform_(-bound, bound, generator=source)
