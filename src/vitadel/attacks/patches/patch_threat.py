"""Patch threats: the attacker may repaint a few patches of the model's own grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.threats import Linf
from vitadel.backbones.anatomy import prefix_tokens_of
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.tokens import patch_grid
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

_CHANGED = 1e-7  # a patch that differs by less counts as unchanged
_ROUNDING = 1e-6  # what float rounding may add to the inner ball


def patches_in(x: Tensor, side: int) -> tuple[int, int]:
    """(rows, columns) of the patches in the images."""
    height, width = x.shape[-2:]
    if height % side or width % side:
        raise UserError(
            f"images of {height} x {width} pixels cannot be cut into patches of side {side}; "
            f"choose a side that divides both (they share {math.gcd(height, width)})"
        )
    return height // side, width // side


def cut(values: Tensor, side: int) -> Tensor:
    """(batch, channels, height, width) as (batch, patches, channels * side * side), patches row by row."""
    rows, columns = patches_in(values, side)
    tiles = values.unflatten(3, (columns, side)).unflatten(2, (rows, side))
    in_order: Tensor = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return in_order


def pixel_mask(chosen: Tensor, x: Tensor, side: int) -> Tensor:
    """One value per patch, (batch, patches), as one per pixel, (batch, 1, height, width)."""
    grid: Tensor = chosen.unflatten(1, patches_in(x, side))
    return grid.repeat_interleave(side, 1).repeat_interleave(side, 2)[:, None]


def changed_patches(z: Tensor, x: Tensor, side: int) -> Tensor:
    """Which patches differ, (batch, patches)."""
    return cut((z.double() - x.double()).abs(), side).amax(2) > _CHANGED


def strongest(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest scores of each row: exactly that many, the first of equal ones."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def count_of_share(share: float, patches: int) -> int:
    """The number of patches in a share: rounded, at least one, none for a share of zero."""
    return max(1, round(share * patches)) if share > 0 else 0


@dataclass(frozen=True)
class PatchGrid:
    """How a model cuts images: `rows` x `columns` patches of `side` pixels, after `prefix` other tokens."""

    rows: int
    columns: int
    side: int
    prefix: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches


def patch_grid_of(model: nn.Module, x: Tensor) -> PatchGrid:
    """The grid of the model's first block for images of the size of `x`; they must tile the image."""
    try:
        rows, columns = patch_grid(model, x)
    except UserError as unknown:
        raise UserError(
            f"patch attacks repaint patches of the model's own grid, which is not known here: {unknown} "
            "Some attacks take a grid as a setting: patches-random(side=16)."
        ) from None
    height, width = x.shape[-2:]
    side = height // rows
    if (rows * side, columns * side) != (height, width):
        raise UserError(
            f"the {rows} x {columns} patches of the model do not tile images of {height} x {width} pixels. "
            "Some attacks take a grid as a setting: patches-random(side=16)."
        )
    return PatchGrid(rows, columns, side, prefix_tokens_of(model))


def patch_side_of(model: nn.Module, x: Tensor) -> int:
    """The side, in pixels of `x`, of the model's patches."""
    return patch_grid_of(model, x).side


def check_images(x: Tensor) -> None:
    """Refuse anything but a batch of images with pixels in [0, 1]."""
    check_pixels(x)
    if x.ndim != 4:
        raise UserError(f"patch attacks need images of shape (batch, channels, height, width), got {tuple(x.shape)}")


@dataclass(frozen=True)
class Patches:
    """At most `count` patches of `side` x `side` pixels may change, to anything in [0, 1].

    With `mild` the whole change must also lie in that ball. Sizes are numbers of patches, so eps is `count`; a change
    outside the mild ball has an infinite size.
    """

    count: int
    side: int
    mild: Threat | None = None

    def __post_init__(self) -> None:
        if self.count < 0 or self.side < 1:
            raise UserError(f"Patches needs count >= 0 and side >= 1, got count {self.count} and side {self.side}")

    @property
    def eps(self) -> float:
        return float(self.count)

    @property
    def _inside(self) -> Threat:
        """The ball inside the patches: the mild one, or the whole box."""
        return Linf(1.0) if self.mild is None else self.mild

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        """Keep the patches that changed most, projected to the box and the mild ball."""
        z = z.clamp(0, 1)
        kept = strongest(cut((z - x).square(), self.side).sum(2), self.count)
        z = torch.where(pixel_mask(kept, x, self.side), z, x)
        return z if self.mild is None else self.mild.project(z, x)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        """Random content in random patches; on the surface every pixel is 0 or 1."""
        rows, columns = patches_in(x, self.side)
        order = rng.stream("patches start").permutation(rows * columns)
        area = pixel_mask(order < self.count, x, self.side)
        if self.mild is not None:
            inner = self.mild.random(x, rng.stream("patches content"), surface)
            # On the surface: project from far outside, to make up for the length that the mask removed.
            return self.mild.project(torch.where(area, x + (inner - x) * (1e6 if surface else 1), x), x)
        content = rng.stream("patches content").uniform(*x.shape[1:]).to(x.dtype)
        return torch.where(area, content.round() if surface else content, x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        """Steepest ascent of the mild ball (or the box) in the patches with the largest gradients.

        `count` such steps, the whole eps, cover the ball's radius once.
        """
        stuck = ((z >= 1) & (grad > 0)) | ((z <= 0) & (grad < 0))
        useful = grad.masked_fill(stuck, 0)
        best = strongest(cut(useful.abs(), self.side).sum(2), self.count)
        step = self._inside.ascent(useful * pixel_mask(best, grad, self.side), z)
        return step * (self._inside.eps / max(self.count, 1))

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        count = changed_patches(z, x, self.side).sum(1).double()
        if self.mild is None:
            return count
        return count.masked_fill(self.mild.size(z, x) > self.mild.eps + _ROUNDING, torch.inf)


def threat_of_share(model: nn.Module, x: Tensor, share: float, side: int) -> Patches:
    """The threat of a share of the patches; a `side` of 0 takes the model's own patches."""
    side = side or patch_side_of(model, x)
    return Patches(count_of_share(share, math.prod(patches_in(x, side))), side)
