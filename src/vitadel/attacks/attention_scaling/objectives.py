"""What a search for attention factors maximizes (Jain & Dutta, CVPR 2024, equation 3 and table 2).

`lpips` and `eq3` are distances between the features of the scaled and the original model. `cross-entropy`, `margin` and
`gama` are losses of the scaled model on the calibration images, as in the paper's table 2. With `deployed-` before
them they are losses of the deployed model on the images that a short PGD finds through the factors, which is what
factors are for. Those have values only: a step along the sign of a gradient has no slope with respect to the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import Changed, Gama, OnLogits, gradient
from vitadel.attacks.losses import cross_entropy, margin, precise
from vitadel.attacks.pgd import PGD
from vitadel.instrument.attention import Factors, scaled_attention
from vitadel.instrument.hooks import block_features, token_sequence
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Goal, Threat

Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
PROBE_STEPS = 3
"""Steps of the PGD behind each value of a `deployed-` objective."""

_GUIDE = 50.0  # weight of GAMA's distance to the original model's probabilities


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


def scaled_features(model: nn.Module, x: Tensor, factors: Factors) -> list[Tensor]:
    """The features of every block with scaled attention, (batch, tokens, channels)."""
    with scaled_attention(model, factors), block_features(model) as features:
        model(x)
    return [token_sequence(model, each) for each in features]


DISTANCES: dict[str, Distance] = {"lpips": lpips_distance, "eq3": eq3_distance}
_GOALS: dict[str, Callable[[], Goal]] = {
    "cross-entropy": partial(OnLogits, cross_entropy),
    "margin": partial(OnLogits, margin),
    "gama": Gama,
}
_DEPLOYED = "deployed-"
LOSSES = tuple(_GOALS)
DEPLOYED = tuple(map(_DEPLOYED.__add__, _GOALS))
OBJECTIVES = (*DISTANCES, *LOSSES, *DEPLOYED)


@dataclass
class Passes:
    """What a calibration has cost so far; a gradient is a forward and a backward pass of one image."""

    gradients: int = 0
    forwards: int = 0

    def add(self, images: int, gradients: int, forwards: int) -> None:
        self.gradients += images * gradients
        self.forwards += images * forwards


def value_cost(objective: str) -> tuple[int, int]:
    """(gradients, forwards) per image behind one value of an objective, without what is computed once per batch."""
    return (PROBE_STEPS, 1 + int("gama" in objective)) if objective in DEPLOYED else (0, 1)


@dataclass(frozen=True)
class BoundObjective:
    """An objective on one batch of calibration images."""

    name: str
    images: Tensor
    per_sample: Callable[[Factors], Tensor]
    passes: Passes = field(default_factory=Passes)

    def value(self, factors: Sequence[float]) -> float:
        """The mean over the images."""
        self.passes.add(len(self.images), *value_cost(self.name))
        with torch.no_grad():
            return float(self.per_sample(tuple(factors)).double().mean())

    def slope(self, at: Tensor, *, as_decades: bool = True) -> Tensor:
        """The gradient of the mean with respect to the factors, or to their decimal logarithms."""
        self.passes.add(len(self.images), 1, 0)
        with torch.enable_grad():
            free = at.detach().to(self.images.device).clone().requires_grad_()
            values = self.per_sample(10**free if as_decades else free)
            return gradient(values.mean(), free).detach().cpu()


@dataclass(frozen=True)
class Probe:
    """A short PGD through scaled attention, to the end, from starts that do not depend on the factors."""

    threat: Threat
    seed: int = 0
    backward_only: bool = False

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, factors: Factors, steps: int, loss: str = "cross-entropy"
    ) -> Tensor:
        change = lambda inner: scaled_attention(inner, factors, backward_only=self.backward_only)  # noqa: E731
        search = PGD(self.threat, _GOALS[loss](), steps=steps, stop_when_fooled=False)
        return search(Changed(model, change), x, y, SampleRNG.of_samples(self.seed, range(len(x)), x.device))


def bind(
    name: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    passes: Passes,
    reference: float | Sequence[float] = 1.0,
    probe: Probe | None = None,
) -> BoundObjective:
    """The objective on these images. The model must be frozen; only losses use the labels, only `deployed-` a probe."""
    if name in DISTANCES:
        with torch.no_grad():
            original = scaled_features(model, x, reference)
        passes.add(len(x), 0, 1)
        distance = DISTANCES[name]
        return BoundObjective(name, x, lambda factors: distance(scaled_features(model, x, factors), original), passes)
    loss = name.removeprefix(_DEPLOYED)
    guide = None
    if loss == "gama":
        with torch.no_grad(), scaled_attention(model, reference):
            guide = precise(model(x)).softmax(1)
        passes.add(len(x), 0, 1)

    def of_logits(logits: Tensor) -> Tensor:
        if guide is None:
            return cross_entropy(logits, y) if loss == "cross-entropy" else margin(logits, y)
        probabilities = precise(logits).softmax(1)
        return margin(probabilities, y) + _GUIDE * (probabilities - guide).square().sum(1)

    def of_scaled(factors: Factors) -> Tensor:
        with scaled_attention(model, factors):
            return of_logits(model(x))

    def of_deployed(factors: Factors) -> Tensor:
        assert probe is not None
        return of_logits(model(probe(model, x, y, factors, PROBE_STEPS, loss)))

    return BoundObjective(name, x, of_deployed if name in DEPLOYED else of_scaled, passes)
