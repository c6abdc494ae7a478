"""Broken defenses in front of the model: staircases, ripples, cut and rounded coefficients, purifiers, detectors."""

from __future__ import annotations

import io
import math
from typing import cast

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.backbones.load import load_model
from vitadel.diagnosis.gallery.entry import (
    ROBUST,
    Around,
    BrokenDefense,
    Change,
    Rule,
    around,
    before,
    looks_noisy,
    smoothed,
    sweep,
)

# --- staircases: flat almost everywhere, at every scale ---------------------------------------------------------------


def rounded_to(bits: int) -> Change:
    levels = 2**bits - 1
    return lambda x: (x * levels).round() / levels


def stairs(height: float) -> Change:
    """Pixels rounded to multiples of `height` levels of 255."""
    return lambda x: (x * 255 / height).round() * height / 255


def straight_through(change: Change) -> Change:
    """The change in the forward pass, the identity in the backward pass."""
    return lambda x: x + (change(x) - x).detach()


def smooth_stairs(width: float, sharpness: float) -> Change:
    """A smooth staircase, `width` levels of 255 per step: all gradients are correct, and either tiny or huge."""

    def climb(x: Tensor) -> Tensor:
        place = x * 255 / width
        floor = place.detach().floor()
        rise = torch.sigmoid(sharpness * (place - floor - 0.5))
        low, high = (1 / (1 + math.exp(side * sharpness / 2)) for side in (1, -1))
        return (floor + (rise - low) / (high - low)) * width / 255

    return climb


def ramps(width: float, share: float) -> Change:
    """A staircase of ramps: each step of `width` levels of 255 rises on a `share` of its way, and is flat on the rest.

    The kinks are where clean pixels are not, so that gradients exist at all of them or none.
    """

    def climb(x: Tensor) -> Tensor:
        place = x * 255 / width + 0.37
        floor = place.detach().floor()
        return (floor + ((place - floor) / share).clamp(0, 1)) * width / 255

    return climb


_STAIRCASES = (
    BrokenDefense(
        "bit depth",
        "pixels rounded to 3 bits",
        before(rounded_to(3)),
        ("staircase", "zero-gradients", "random-noise", "black-box"),
        family="staircases",
    ),
    BrokenDefense(
        "bit depth, straight through",
        "to 4 bits, with the gradient of the identity",
        before(straight_through(rounded_to(4))),
        family="staircases",
    ),
    *sweep(
        "staircases",
        "rounded pixels",
        "pixels rounded to multiples of the strength, in levels of 255",
        lambda height: before(stairs(height)),
        (0.000255, 0.01, 0.5, 8),
    ),
    *sweep(
        "staircases",
        "smooth staircase by width",
        "a smooth staircase of sharpness 20, whose steps are so many levels of 255 wide",
        lambda width: before(smooth_stairs(width, 20)),
        (0.1, 0.5, 2, 8),
    ),
    *sweep(
        "staircases",
        "smooth staircase by sharpness",
        "a smooth staircase of this sharpness, 2/255 wide",
        lambda sharpness: before(smooth_stairs(2, sharpness)),
        (10, 50, 400),
    ),
    *sweep(
        "staircases",
        "ramps",
        "a staircase of ramps, 3/255 wide, that rise on this share of the way",
        lambda share: before(ramps(3, share)),
        (0.2, 0.05),
    ),
)


# --- ripples: correct gradients that mostly describe the ripple -------------------------------------------------------


def rippled(width: float, steepness: float, anywhere: bool = False) -> Change:
    """Add a sine to the pixels, `width` levels of 255 wide and `steepness` times as steep as the pixels.

    All gradients are correct, and most of them follow the ripple. `anywhere`: the ripple is shifted at every call.
    """
    turns = 2 * math.pi * 255 / width

    def ripple(x: Tensor) -> Tensor:
        shift = 2 * math.pi * torch.rand(len(x), 1, 1, 1).to(x) if anywhere else 0.3
        return x + steepness / turns * torch.sin(turns * x + shift)

    return ripple


def triangle(period: float, slope: float) -> Change:
    """Add a triangle wave, `period` levels of 255 wide; with a slope above 1 half of all gradients point back."""

    def wave(x: Tensor) -> Tensor:
        place = x * 255 / period + 0.13
        turn = place - place.detach().floor()
        return x + slope * period / 255 * ((turn - 0.5).abs() - 0.25)

    return wave


_RIPPLES = (
    BrokenDefense(
        "narrow ripples",
        "pixels with a ripple, 1.5/255 wide",
        before(rippled(1.5, 4)),
        ("step-sensitivity", "restart-sensitivity"),
        family="ripples",
    ),
    BrokenDefense(
        "wide ripples",
        "the same, 4/255 wide",
        before(rippled(4, 10)),
        ("step-sensitivity",),
        family="ripples",
    ),
    *sweep(
        "ripples",
        "triangle wave by period",
        "a triangle wave of slope 1.5, so many levels of 255 per period, added to the pixels",
        lambda period: before(triangle(period, 1.5)),
        (0.1, 0.5, 2, 8),
    ),
    *sweep(
        "ripples",
        "triangle wave by slope",
        "a triangle wave of this slope, 2/255 per period, added to the pixels",
        lambda slope: before(triangle(2, slope)),
        (1.1, 4),
    ),
    *sweep(
        "ripples",
        "sine by steepness",
        "a sine, 2/255 wide and so many times as steep as the pixels, added to them",
        lambda steepness: before(rippled(2, steepness)),
        (3,),
    ),
)


# --- transforms that cut or round coefficients ------------------------------------------------------------------------


def jpeg(quality: int) -> Change:
    """Compress and decompress every image, in bytes: there is no gradient."""

    def compressed(x: Tensor) -> Tensor:
        pictures = []
        for picture in (x.detach().clamp(0, 1) * 255).round().byte().cpu():
            file = io.BytesIO()
            Image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=quality)
            decoded = Image.open(file).convert("RGB")
            raw = torch.frombuffer(bytearray(decoded.tobytes()), dtype=torch.uint8)
            pictures.append(raw.view(decoded.height, decoded.width, 3).permute(2, 0, 1))
        return torch.stack(pictures).to(x) / 255

    return compressed


def in_blocks(change: Change) -> Change:
    """Apply a change to the cosine coefficients of every 8 x 8 block of an image."""
    rows = torch.arange(8, dtype=torch.float64)
    basis = torch.cos((2 * rows[None] + 1) * rows[:, None] * math.pi / 16) * 0.5
    basis[0] *= math.sqrt(0.5)

    def transformed(x: Tensor) -> Tensor:
        matrix = basis.to(x)
        blocks = x.unflatten(3, (-1, 8)).unflatten(2, (-1, 8)).transpose(3, 4)
        coefficients = change(matrix @ blocks @ matrix.T)
        return (matrix.T @ coefficients @ matrix).transpose(3, 4).flatten(4, 5).flatten(2, 3)

    return transformed


def low_frequencies(count: int) -> Change:
    """Of 8 x 8 coefficients, those of the `count` lowest frequencies in both directions; a linear projection."""

    def cut(coefficients: Tensor) -> Tensor:
        kept = torch.zeros(8, 8).to(coefficients)
        kept[:count, :count] = 1
        return coefficients * kept

    return cut


_TRANSFORMS = (
    BrokenDefense(
        "JPEG",
        "compressed and decompressed",
        before(jpeg(95)),
        ("staircase", "zero-gradients"),
        ROBUST,
        "transforms",
    ),
    *sweep(
        "transforms",
        "JPEG by quality",
        "compressed and decompressed with this quality",
        lambda quality: before(jpeg(int(quality))),
        (50,),
    ),
    *sweep(
        "transforms",
        "rounded coefficients",
        "cosine coefficients of 8 x 8 blocks rounded to multiples of the strength",
        lambda step: before(in_blocks(lambda c: (c / step).round() * step)),
        (0.004, 0.1),
    ),
    *sweep(
        "transforms",
        "cut coefficients",
        "only so many of 8 frequencies in each direction, without gradients",
        lambda count: before(lambda x: in_blocks(low_frequencies(int(count)))(x).detach()),
        (5,),
    ),
    *sweep(
        "transforms",
        "small coefficients cut",
        "cosine coefficients below the strength set to zero: correct gradients, and jumps",
        lambda level: before(in_blocks(lambda c: torch.where(c.abs() > level, c, 0 * c))),
        (0.02, 0.1),
    ),
)


# --- purifiers and detectors ------------------------------------------------------------------------------------------


def median_of(side: int) -> Change:
    """The median of every `side` x `side` pixels: honest, with kinks."""

    def filtered(x: Tensor) -> Tensor:
        border = side // 2
        padded = F.pad(x, (border,) * 4, mode="replicate")
        return padded.unfold(2, side, 1).unfold(3, side, 1).flatten(4).median(4).values

    return filtered


def _anti_adversary(steps: int) -> Rule:
    def moved(model: nn.Module, x: Tensor) -> Tensor:
        """Move every image deeper into its predicted class first (Alfarra et al. 2022, arXiv:2103.14347); gradients
        ignore the move."""
        with torch.enable_grad():
            z = x.detach().clone()
            for _ in range(steps):
                logits = model(z.requires_grad_())
                (grad,) = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1), reduction="sum"), z)
                z = (z - 8 / 255 * grad.sign()).detach()
        return cast(Tensor, model(x + (z - x).detach()))

    return moved


def _mixed(weight: float, change: Change) -> Change:
    """A share of the changed image, which gradients do not see, and the rest of the image itself."""
    return lambda x: (1 - weight) * x + weight * change(x).detach()


_PURIFIERS = (
    BrokenDefense(
        "anti-adversary",
        "images are moved away from other classes first",
        around(_anti_adversary(3)),
        ("test-time-optimization",),  # its jumps have a slope of every size on one side or the other
        ROBUST,
        "purifiers",
    ),
    *sweep(
        "purifiers",
        "median filter, detached",
        "the median of so many pixels squared, without gradients",
        lambda side: before(lambda x: median_of(int(side))(x).detach()),
        (3,),
    ),
    *sweep(
        "purifiers",
        "smoothing, partly detached",
        "this share of the image is smoothed, without gradients; the rest passes",
        lambda weight: before(_mixed(weight, smoothed)),
        (0.5, 1),
    ),
    *sweep(
        "purifiers",
        "denoised by ripples",
        "pixels move towards the smoothed image by multiples of the strength, in levels of 255",
        lambda step: before(lambda x: x + stairs(step)(smoothed(x) - x)),
        (1, 4),
    ),
)


def on_noisy_only(change: Change) -> Change:
    def changed(x: Tensor) -> Tensor:
        return torch.where(looks_noisy(x, 0.006)[:, None, None, None], change(x), x)

    return changed


def _nan_if_noisy(x: Tensor) -> Tensor:
    """NaN for images that look noisy: their prediction is then never seen to change."""
    return x.masked_fill(looks_noisy(x, 0.006)[:, None, None, None], math.nan)


def _detector(level: float) -> Rule:
    def detected(model: nn.Module, x: Tensor) -> Tensor:
        """Classify a smoothed copy, without gradients, if an image looks noisy."""
        return torch.where(looks_noisy(x, level)[:, None], model(smoothed(x)).detach(), model(x))

    return detected


class _BentAtOneStep(Around):
    """A robust model answers where noise is as strong as one full step makes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.robust = load_model(ROBUST)

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(looks_noisy(x, 0.011)[:, None], self.robust(x), self.model(x))


_DETECTORS = (
    BrokenDefense(
        "NaN as an answer",
        "images that look noisy are refused",
        before(_nan_if_noisy),
        ("non-finite-outputs",),
        family="detectors",
    ),
    BrokenDefense(
        "detector",
        "noisy images are smoothed and detached",
        around(_detector(0.006)),
        ("zero-gradients", "wrong-gradients"),
        ROBUST,
        "detectors",
    ),
    BrokenDefense(
        "relieved",
        "a robust model answers where one full step has been taken",
        _BentAtOneStep,
        ("single-step",),
        family="detectors",
    ),
    *sweep(
        "detectors",
        "detector by level",
        "images noisier than the strength are smoothed and detached",
        lambda level: around(_detector(level)),
        (0.003, 0.015),
    ),
    *sweep(
        "detectors",
        "stairs if noisy",
        "images that look noisy are rounded to multiples of the strength, in levels of 255",
        lambda height: before(on_noisy_only(stairs(height))),
        (4,),
    ),
)

PIXELS = _STAIRCASES + _RIPPLES + _TRANSFORMS + _PURIFIERS + _DETECTORS
