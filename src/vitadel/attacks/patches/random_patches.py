"""Patches: an attacker who may repaint a few patches of the model's own grid, and the simplest such attack, noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.threats import Linf
from vitadel.backbones.anatomy import prefix_tokens_of
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.model_checks import check_pixels
from vitadel.errors import UserError, nearest_names
from vitadel.instrument.hooks import frozen
from vitadel.instrument.patch_grid import patch_grid
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

__all__ = [
    "NOISES",
    "PatchGrid",
    "Patches",
    "RandomPatches",
    "changed_patches",
    "check_images",
    "check_noise",
    "count_of_share",
    "cut",
    "normalisation_of",
    "patch_grid_of",
    "patch_side_of",
    "patches_in",
    "patches_random",
    "pixel_mask",
    "strongest",
    "uniform_noise",
    "worst_of",
]

_CHANGED = 1e-7  # a patch that differs by less than this is as it was
_ROUNDING = 1e-6  # what float rounding may add to the inner ball
NOISES = ("normalised", "pixel")


# --- the grid ---------------------------------------------------------------------------------------------------------


def patches_in(x: Tensor, side: int) -> tuple[int, int]:
    """(rows, columns) of patches that the images are tiled by."""
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
    """The `count` largest of each row as a mask: exactly that many, of equal ones the first."""
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)


def count_of_share(share: float, patches: int) -> int:
    """How many patches a share is: rounded, at least one, none for a share of zero."""
    return max(1, round(share * patches)) if share > 0 else 0


@dataclass(frozen=True)
class PatchGrid:
    """How a model cuts its images: `rows` x `columns` patches of `side` pixels, after `prefix` other tokens."""

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
    """The patches that the model's first block works on, where they tile images of the size of `x`."""
    try:
        rows, columns = patch_grid(model, x)
    except UserError as unknown:
        raise UserError(
            f"patch attacks repaint patches of the model's own grid, and no grid is known here: {unknown} "
            "Where the attack has the setting, a grid can be given: patches-random(side=16)."
        ) from None
    height, width = x.shape[-2:]
    side = height // rows
    if (rows * side, columns * side) != (height, width):
        raise UserError(
            f"the {rows} x {columns} patches of the model do not tile images of {height} x {width} pixels. "
            "Patch attacks need tiles; where the attack has the setting, give a grid: patches-random(side=16)."
        )
    return PatchGrid(rows, columns, side, prefix_tokens_of(model))


def patch_side_of(model: nn.Module, x: Tensor) -> int:
    """The side, in pixels of `x`, of the patches that the model sees."""
    return patch_grid_of(model, x).side


def check_images(x: Tensor) -> None:
    """Refuse what is no batch of images with pixels in [0, 1]."""
    check_pixels(x)
    if x.ndim != 4:
        raise UserError(f"patch attacks need images of shape (batch, channels, height, width), got {tuple(x.shape)}")


# --- the threat -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patches:
    """At most `count` patches of the grid may change, in `side` x `side` pixels to anything in [0, 1].

    `mild` is a ball in which the whole change must lie besides. Lengths are numbers of patches, so eps is `count`; a
    change that breaks the mild ball has no finite length.
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
        """The ball inside the patches; without a mild one, that is the whole box."""
        return Linf(1.0) if self.mild is None else self.mild

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        """The patches that changed most keep their content, as far as the box and the mild ball allow."""
        z = z.clamp(0, 1)
        kept = strongest(cut((z - x).square(), self.side).sum(2), self.count)
        z = torch.where(pixel_mask(kept, x, self.side), z, x)
        return z if self.mild is None else self.mild.project(z, x)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        """Random content in random patches; on the surface every value is as far as it can go, up or down."""
        rows, columns = patches_in(x, self.side)
        order = rng.stream("patches start").permutation(rows * columns)
        area = pixel_mask(order < self.count, x, self.side)
        if self.mild is not None:
            inner = self.mild.random(x, rng.stream("patches content"), surface)
            # What the mask takes away from a length is given back on the surface, by projecting from far outside.
            return self.mild.project(torch.where(area, x + (inner - x) * (1e6 if surface else 1), x), x)
        content = rng.stream("patches content").uniform(*x.shape[1:]).to(x.dtype)
        return torch.where(area, content.round() if surface else content, x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        """Along the mild ball's (or the box's) steepest direction, in the patches where the gradient is largest.

        `count` such steps, the whole eps, lead once across the ball's radius.
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


# --- noise ------------------------------------------------------------------------------------------------------------


def normalisation_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation by which the model normalises pixels, each (1, channels, 1, 1) or one number."""
    known = next((module for module in model.modules() if isinstance(module, Classifier)), None)
    return (torch.tensor(0.0), torch.tensor(1.0)) if known is None else (known.mean, known.std)


def uniform_noise(model: nn.Module, x: Tensor, rng: SampleRNG, noise: str = "normalised") -> Tensor:
    """Uniform noise of the images' shape, in pixels.

    "normalised" draws from [0, 1) in the space that the model normalises to, as AFAT's training does: with ImageNet's
    numbers a light grey, [.485, .714) in red, of low contrast. "pixel" draws from all colours.
    """
    lots = rng.uniform(*x.shape[1:]).to(x.dtype)
    if noise == "pixel":
        return lots
    mean, std = normalisation_of(model)
    return (mean.to(x) + std.to(x) * lots).clamp(0, 1)


def check_noise(share: float, masks: int, noise: str) -> None:
    """Refuse settings by which nothing could be corrupted."""
    if not 0 < share <= 1:
        raise UserError(f"share is the share of patches that are replaced: it must be in (0, 1], got {share:g}")
    if masks < 1:
        raise UserError(f"at least 1 mask must be tried, got {masks}")
    if noise not in NOISES:
        raise UserError(f"unknown noise {noise!r}{nearest_names(noise, NOISES) or '.'} Known: {', '.join(NOISES)}.")


def worst_of(model: nn.Module, x: Tensor, y: Tensor, tries: int, propose: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Of `tries` proposals the one with the largest margin; a fooled sample is not tried again.

    `propose(turn, place)` gives images for the samples at these places of the batch.
    """
    found = x.clone()
    best = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    place = torch.arange(len(x), device=x.device)
    for turn in range(tries):
        if len(place) == 0:
            break
        trial = propose(turn, place)
        logits = model(trial)
        value, wrong = margin(logits, y[place]).to(best.dtype), fooled(model, trial, logits, y[place])
        better = (value > best[place]) | wrong
        found[place[better]] = trial[better]
        best[place] = torch.maximum(value, best[place])
        place = place[~wrong]
    return found


@dataclass(frozen=True)
class RandomPatches:
    """Noise in a random share of the patches (AFAT, table 3); of `masks` random masks the worst is kept.

    It has a threat of its own, `rules`; of the given one only an eps of zero counts, which forbids any change. `side`
    0 is the model's own patch side; with another one it runs on any model.
    """

    threat: Threat
    share: float = 0.1
    masks: int = 10
    side: int = 0
    noise: str = "normalised"

    def __post_init__(self) -> None:
        check_noise(self.share, self.masks, self.noise)

    def rules(self, model: nn.Module, x: Tensor) -> Threat:
        """What the proposals obey; known only with the model, whose grid it is about."""
        return self._patches(model, x)

    def _patches(self, model: nn.Module, x: Tensor) -> Patches:
        side = self.side or patch_side_of(model, x)
        return Patches(count_of_share(self.share, math.prod(patches_in(x, side))), side)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_images(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        rules = self._patches(model, x)
        patches = math.prod(patches_in(x, rules.side))

        def propose(turn: int, place: Tensor) -> Tensor:
            lots = rng[place].stream("mask", turn)
            chosen = (
                lots.permutation(patches) < rules.count
            )  # the places of the first in a random order are random places
            fill = uniform_noise(model, x[place], lots.stream("noise"), self.noise)
            return torch.where(pixel_mask(chosen, x, rules.side), fill, x[place])

        with frozen(model), torch.no_grad():
            return worst_of(model, x, y, self.masks, propose)

    def passes(self) -> tuple[int, int]:
        return 0, self.masks


def patches_random(
    threat: Threat, share: float = 0.1, masks: int = 10, side: int = 0, noise: str = "normalised"
) -> Attack:
    return RandomPatches(threat, share, masks, side, noise)
