"""Noise in random patches (AFAT, CVPR 2023), and the noise that patch attacks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.patches.patch_threat import check_images, patches_in, pixel_mask, threat_of_share
from vitadel.attacks.per_sample import takes_arrays
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError, check_known
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

NOISES = ("normalised", "pixel")


def normalization_of(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the model's normalization, each (1, channels, 1, 1) or one number."""
    known = next((module for module in model.modules() if isinstance(module, Classifier)), None)
    return (torch.tensor(0.0), torch.tensor(1.0)) if known is None else (known.mean, known.std)


def uniform_noise(model: nn.Module, x: Tensor, rng: SampleRNG, noise: str = "normalised") -> Tensor:
    """Uniform noise of the images' shape, in pixels.

    "normalised" draws from [0, 1) in the space of normalized pixels, as AFAT's training does: with ImageNet's numbers a
    light gray, [.485, .714) in red, of low contrast. "pixel" draws from all colors.
    """
    uniform = rng.uniform(*x.shape[1:]).to(x.dtype)
    if noise == "pixel":
        return uniform
    mean, std = normalization_of(model)
    return (mean.to(x) + std.to(x) * uniform).clamp(0, 1)


def check_noise(share: float, masks: int, noise: str) -> None:
    """Check the settings that attacks with noise in patches share."""
    if not 0 < share <= 1:
        raise UserError(f"share is the share of patches that are replaced: it must be in (0, 1], got {share:g}")
    if masks < 1:
        raise UserError(f"at least 1 mask must be tried, got {masks}")
    check_known("noise", noise, NOISES)


def worst_of(model: nn.Module, x: Tensor, y: Tensor, tries: int, propose: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Of `tries` proposals the one with the largest margin; fooled samples are not tried again.

    `propose(number, place)` gives images for the samples at `place` of the batch.
    """
    found = x.clone()
    best = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
    place = torch.arange(len(x), device=x.device)
    for number in range(tries):
        if len(place) == 0:
            break
        trial = propose(number, place)
        logits = model(trial)
        value, wrong = margin(logits, y[place]).to(best.dtype), fooled(model, trial, logits, y[place])
        better = (value > best[place]) | wrong
        found[place[better]] = trial[better]
        best[place] = torch.maximum(value, best[place])
        place = place[~wrong]
    return found


@dataclass(frozen=True)
class RandomPatches:
    """Noise in a random share of the patches (AFAT, table 3), the worst of `masks` random masks.

    Its own threat (`rules`) replaces the given one, of which only an eps of zero counts: no change. A `side` of 0 is
    the side of the model's patches; with another one the attack runs on any model.
    """

    threat: Threat
    share: float = 0.1
    masks: int = 10
    side: int = 0
    noise: str = "normalised"

    def __post_init__(self) -> None:
        check_noise(self.share, self.masks, self.noise)

    def rules(self, model: nn.Module, x: Tensor) -> Threat:
        """The patch threat of the images; it depends on the model's grid."""
        return threat_of_share(model, x, self.share, self.side)

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_images(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        rules = threat_of_share(model, x, self.share, self.side)
        patches = math.prod(patches_in(x, rules.side))

        def propose(number: int, place: Tensor) -> Tensor:
            own = rng[place].stream("mask", number)
            chosen = own.permutation(patches) < rules.count  # `count` random patches
            fill = uniform_noise(model, x[place], own.stream("noise"), self.noise)
            return torch.where(pixel_mask(chosen, x, rules.side), fill, x[place])

        with frozen(model), torch.no_grad():
            return worst_of(model, x, y, self.masks, propose)

    def passes(self) -> tuple[int, int]:
        return 0, self.masks
