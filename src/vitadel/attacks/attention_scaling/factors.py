"""Search for attention factors that move a model's features far from the original ones (Jain & Dutta, CVPR 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import gradient
from vitadel.backbones.anatomy import attentions_of
from vitadel.instrument.attention import Factors, scaled_attention
from vitadel.instrument.hooks import block_features, token_sequence
from vitadel.runtime.rng import SampleRNG

_SMALLEST, _LARGEST = 1e-7, 1.0

Calibration = Iterable[tuple[Tensor, Tensor]]
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def lpips_distance(features: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """LPIPS-like distance of features from a reference, per sample (Zhang et al. 2018).

    Every token is normalized over channels and every layer divided by the root of its number of tokens, so that all
    layers have equal weight.
    """
    total: Tensor | float = 0.0
    for ours, theirs in zip(features, reference, strict=True):
        ours, theirs = _tokens(ours), _tokens(theirs)
        difference = nn.functional.normalize(ours, dim=-1) - nn.functional.normalize(theirs, dim=-1)
        total = total + difference.square().sum((1, 2)) / ours.shape[1]
    # The root has no gradient at zero, the distance of an unscaled model.
    return (torch.as_tensor(total) + 1e-24).sqrt()


def eq3_distance(features: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """The paper's equation 3, per sample: differences over the product of both lengths, summed over layers."""
    total: Tensor | float = 0.0
    for ours, theirs in zip(features, reference, strict=True):
        ours, theirs = ours.flatten(1), theirs.flatten(1)
        away = ((ours - theirs).square().sum(1) + 1e-24).sqrt()
        total = total + away / (ours.norm(dim=1) * theirs.norm(dim=1)).clamp(min=1e-12)
    return torch.as_tensor(total)


def _tokens(features: Tensor) -> Tensor:
    """Features of any shape with channels last, as (batch, tokens, channels)."""
    return features.flatten(1, -2) if features.ndim > 2 else features[:, None]


DISTANCES: dict[str, Distance] = {"lpips": lpips_distance, "eq3": eq3_distance}


def search_factors(
    model: nn.Module,
    calibration: Calibration,
    rng: SampleRNG,
    steps: int = 10,
    pace: float = 0.3,
    distance: str = "lpips",
    reference: float | Sequence[float] = 1.0,
    smallest: float = _SMALLEST,
) -> tuple[float, ...]:
    """Factors of the attentions that maximize the distance from the features with the `reference` factors.

    Gradient ascent on decimal logarithms from one random start: `steps` on each batch, each of `pace` decades along the
    normalized gradient, between `smallest` and 1. The model must be frozen. Labels are not used.
    """
    low, high = math.log10(smallest), math.log10(_LARGEST)
    decades = (-2 * rng.uniform(len(attentions_of(model)))[0].double()).clamp(low, high)
    for x, _ in calibration:
        with torch.no_grad():
            original = scaled_features(model, x, reference)
        for _ in range(steps):
            slope = _slope(model, x, original, decades, DISTANCES[distance], as_decades=True)
            decades = (decades + pace * slope / slope.abs().max().clamp(min=1e-30)).clamp(low, high)
    return tuple((10**decades).tolist())


def search_factors_as_printed(
    model: nn.Module, calibration: Calibration, rng: SampleRNG, steps: int
) -> tuple[float, ...]:
    """The paper's algorithm 1 as printed.

    Additive normal noise on every batch, raw gradients of equation 3, and the factors so far as reference.
    """
    factors = torch.ones(len(attentions_of(model)), dtype=torch.float64)
    for number, (x, _) in enumerate(calibration):
        with torch.no_grad():
            reference = scaled_features(model, x, tuple(factors.tolist()))
        delta = rng.stream("noise", number).normal(len(factors))[0].double()
        for _ in range(steps):
            here = (factors + delta).clamp(_SMALLEST, _LARGEST)
            delta = delta + _slope(model, x, reference, here, eq3_distance, as_decades=False)
        factors = (factors + delta).clamp(_SMALLEST, _LARGEST)
    return tuple(factors.tolist())


def _slope(
    model: nn.Module, x: Tensor, reference: Sequence[Tensor], at: Tensor, distance: Distance, *, as_decades: bool
) -> Tensor:
    """The gradient of the mean distance, with respect to factors or to their decimal logarithms."""
    with torch.enable_grad():
        free = at.detach().to(x.device).clone().requires_grad_()
        factors = 10**free if as_decades else free
        return gradient(distance(scaled_features(model, x, factors), reference).mean(), free).detach().cpu()


def scaled_features(model: nn.Module, x: Tensor, factors: Factors) -> list[Tensor]:
    """The features of every block with scaled attention, (batch, tokens, channels)."""
    with scaled_attention(model, factors), block_features(model) as features:
        model(x)
    return [token_sequence(model, each) for each in features]
