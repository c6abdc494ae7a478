"""Adaptive attention scaling: attack through softened attention (Jain & Dutta, CVPR 2024).

Saturated softmax attention passes hardly any gradient. The paper scales the scores of every attention by factors that
move the features as far as possible from the original model's, and attacks the model so changed. It seems to judge
success on that changed model too, which says nothing about the one in use. Here proposals count on the deployed model
only, joined with the plain attack, and the paper's way of counting is a note beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.features import token_sequence
from vitadel.attacks.goals import clearly_fooled, gradient
from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.pgd import PGD
from vitadel.attacks.sample_info import Notes, join_notes, proposals
from vitadel.attacks.transfer.surrogate import Surrogate, changed, deployed, seen_through
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.model_checks import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.attention import Factors, scaled_attention
from vitadel.instrument.features import block_features
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

__all__ = ["AAS", "DISTANCES", "PAPER_STYLE", "Rescaled", "ascended_factors", "eq3_distance", "lpips_distance"]

PAPER_STYLE = "paper_style"
"""The note of an attack on a changed model: whether that model still gives the label."""

_SMALLEST, _LARGEST = 1e-7, 1.0
_GRID = (0.1, 0.01, 0.001)  # the paper's manual scales that are worth trying beside the ascent's result
_PROBE_STEPS = 10
_THROUGH = "rescaled"  # the stream of draws of a search through scaled attention


def lpips_distance(features: Sequence[Tensor], reference: Sequence[Tensor]) -> Tensor:
    """How far features are from a reference, per sample, in the manner of LPIPS (Zhang et al. 2018).

    Every token is normalised over channels and every layer divided by the root of its number of tokens, so that
    neither layers with large features nor those with many tokens count more.
    """
    total: Tensor | float = 0.0
    for ours, theirs in zip(features, reference, strict=True):
        ours, theirs = _tokens(ours), _tokens(theirs)
        difference = nn.functional.normalize(ours, dim=-1) - nn.functional.normalize(theirs, dim=-1)
        total = total + difference.square().sum((1, 2)) / ours.shape[1]
    # The root has no slope at zero, which is where an unscaled model stands.
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
    """(batch, tokens, channels) of any shape with channels last."""
    return features.flatten(1, -2) if features.ndim > 2 else features[:, None]


Calibration = Iterable[tuple[Tensor, Tensor]]
Distance = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
DISTANCES: dict[str, Distance] = {"lpips": lpips_distance, "eq3": eq3_distance}


@dataclass(frozen=True)
class Rescaled:
    """An attack on the model with scaled attention, then the plain one on the samples that still stand.

    `factors`: one number, or one per softmax attention. With `backward_only` the forward pass stays that of the
    deployed model and only gradients pass through scaled attention. With `literal` the search, too, takes the scaled
    model for the one to fool, as in the paper. The plain attack draws what it would draw alone, so the two together
    are never weaker than it. With `paper_style`, `explain` also counts as the paper does.
    """

    attack: Attack
    factors: float | tuple[float, ...] = 0.01
    backward_only: bool = False
    literal: bool = False
    paper_style: bool = False

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        z, notes = self._through(model, x, y, rng, noted=False)
        return self._joined(model, x, y, rng, z, notes, noted=False)

    def explain(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, Notes]:
        """With the notes of the attack: those of its plain run where that one came last."""
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        z, notes = self._through(model, x, y, rng, noted=True)
        style = {PAPER_STYLE: self._scaled_model_holds(model, x, y, rng, z)} if self.paper_style else {}
        z = self._joined(model, x, y, rng, z, notes, noted=True)
        return z, {**notes, **style}

    def _through(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, noted: bool) -> tuple[Tensor, Notes]:
        """The attack through scaled attention."""
        check_pixels(x)
        attentions_of(model)  # a model without attention is refused before anything is spent on it
        view = seen_through(model, lambda inner: changed(inner, self._change))
        if not self._sees_its_own_verdicts:
            view = Surrogate(view, deployed(model))
        return proposals(self.attack, view, x, y, rng.stream(_THROUGH), noted)

    @property
    def _sees_its_own_verdicts(self) -> bool:
        """With scaled gradients only, outputs are the deployed model's and need no second look."""
        return self.literal or self.backward_only

    def _scaled_model_holds(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, z: Tensor) -> Tensor:
        """Whether the scaled model, attacked itself and to the end, gives the label.

        `z` does not tell, but where it fools that model, too: samples left when the deployed model fell.
        """
        scaled = changed(deployed(model), partial(scaled_attention, factors=self.factors))

        def right(images: Tensor, labels: Tensor) -> Tensor:
            with frozen(model), torch.no_grad():
                logits: Tensor = scaled(images)
            return logits.argmax(1) == labels

        holds = right(z, y)
        if not self.literal and bool(holds.any()):
            aimed = self.attack(scaled, x[holds], y[holds], rng[holds].stream(_THROUGH))
            holds[holds.clone()] = right(aimed, y[holds])
        return holds

    def _joined(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, z: Tensor, notes: Notes, noted: bool
    ) -> Tensor:
        """`z`, with the plain attack's proposals in place of those that do not fool the deployed model."""
        with frozen(model), torch.no_grad():
            standing = (~clearly_fooled(deployed(model)(z), y)).nonzero().squeeze(1)
        if len(standing):
            z = z.clone()  # an attack may have handed back the clean images themselves
            z[standing], told = proposals(self.attack, model, x[standing], y[standing], rng[standing], noted)
            join_notes(notes, told, standing, len(x))
        return z

    def _change(self, model: nn.Module) -> AbstractContextManager[None]:
        return scaled_attention(model, self.factors, backward_only=self.backward_only)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # Every look at the scaled model may need one at the deployed model.
        looks = 0 if self._sees_its_own_verdicts else gradients + forwards
        runs, verdicts = 2, 1
        if self.paper_style:
            runs, verdicts = runs + (not self.literal), verdicts + 1 + (not self.literal)
        return runs * gradients, runs * forwards + looks + verdicts


@dataclass(frozen=True)
class AAS:
    """Find universal factors on calibration images, then attack through them.

    The sound reading: ascent of the logarithm of the factors, steps of `pace` decades along the normalised gradient,
    `ascent_steps` on each batch, from one random start; the reference is always the original model. With `select` the
    result competes with uniform factors of 0.1, 0.01 and 0.001: the factors are taken whose 10-step PGD hurts the
    deployed model most. `literal` is algorithm 1 as printed: additive normal noise on every batch, raw gradients of
    equation 3, and a reference that drifts along.
    """

    attack: Attack
    backward_only: bool = False
    literal: bool = False
    images: int = 1280
    ascent_steps: int = 10
    pace: float = 0.3
    distance: str = "lpips"
    select: bool = True
    paper_style: bool = False

    def __post_init__(self) -> None:
        if self.distance not in DISTANCES:
            raise UserError(f"unknown distance {self.distance!r}; allowed: {', '.join(DISTANCES)}")
        if min(self.images, self.ascent_steps) < 1:
            raise UserError(
                f"aas needs at least 1 calibration image and 1 step, got {self.images} and {self.ascent_steps}"
            )

    @property
    def calibration_images(self) -> int:
        return self.images

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        raise UserError(
            "aas must find its factors on calibration images first, which are not the attacked ones: call "
            "attack.prepared(model, [(images, labels), ...]) and use what it returns; `vitadel audit` does so by itself"
        )

    def prepared(self, model: nn.Module, calibration: Calibration, seed: int = 0) -> Rescaled:
        """The attack through the factors found; the labels only serve `select`."""
        rng = SampleRNG.of_samples(seed, [0]).stream("aas factors")
        with frozen(model):
            if self.literal:
                factors = self._literal_ascent(model, calibration, rng)
            else:
                factors = ascended_factors(model, calibration, rng, self.ascent_steps, self.pace, self.distance)
            if self.select and not self.literal:
                factors = self._most_harmful(model, calibration, factors, seed)
        return self._through(factors)

    def _through(self, factors: tuple[float, ...]) -> Rescaled:
        return Rescaled(self.attack, factors, self.backward_only, self.literal, self.paper_style)

    def passes(self) -> tuple[int, int]:
        """Of the attack itself; the preparation is shared by all samples."""
        return self._through(()).passes()

    def _literal_ascent(self, model: nn.Module, calibration: Calibration, rng: SampleRNG) -> tuple[float, ...]:
        factors = torch.ones(len(attentions_of(model)), dtype=torch.float64)
        for turn, (x, _) in enumerate(calibration):
            with torch.no_grad():
                reference = _features(model, x, tuple(factors.tolist()))
            delta = rng.stream("noise", turn).normal(len(factors))[0].double()
            for _ in range(self.ascent_steps):
                here = (factors + delta).clamp(_SMALLEST, _LARGEST)
                delta = delta + _slope(model, x, reference, here, eq3_distance, as_decades=False)
            factors = (factors + delta).clamp(_SMALLEST, _LARGEST)
        return tuple(factors.tolist())

    def _most_harmful(
        self, model: nn.Module, calibration: Calibration, found: tuple[float, ...], seed: int
    ) -> tuple[float, ...]:
        """By the loss of the deployed model after a short PGD through each candidate, on the first batch."""
        x, y = next(iter(calibration), (None, None))
        if x is None or y is None:
            raise UserError(
                "aas needs calibration images that can be gone through twice: give a list of (images, labels), not an "
                "empty one or an iterator"
            )
        candidates = [found, *((factor,) * len(found) for factor in _GRID)]
        losses = [self._harm(model, x, y, candidate, seed) for candidate in candidates]
        return candidates[losses.index(max(losses))]

    def _harm(self, model: nn.Module, x: Tensor, y: Tensor, factors: tuple[float, ...], seed: int) -> float:
        probe = PGD(_ball_of(self.attack), steps=_PROBE_STEPS, stop_when_fooled=False)
        scaled = changed(model, self._through(factors)._change)
        z = probe(scaled, x, y, SampleRNG.of_samples(seed, range(len(x)), x.device))
        with torch.no_grad():
            return float(cross_entropy(model(z), y).double().mean())


def ascended_factors(
    model: nn.Module,
    calibration: Calibration,
    rng: SampleRNG,
    steps: int = 10,
    pace: float = 0.3,
    distance: str = "lpips",
    reference: float | Sequence[float] = 1.0,
    smallest: float = _SMALLEST,
) -> tuple[float, ...]:
    """Factors of a model's attentions that move its features far from what they are with the `reference` factors.

    Ascent of decimal logarithms from one random start, `steps` on each batch, each of `pace` decades along the
    normalised gradient, between `smallest` and 1. The model should be frozen. Labels are not used.
    """
    low, high = math.log10(smallest), math.log10(_LARGEST)
    decades = (-2 * rng.uniform(len(attentions_of(model)))[0].double()).clamp(low, high)
    for x, _ in calibration:
        with torch.no_grad():
            original = _features(model, x, reference)
        for _ in range(steps):
            slope = _slope(model, x, original, decades, DISTANCES[distance], as_decades=True)
            decades = (decades + pace * slope / slope.abs().max().clamp(min=1e-30)).clamp(low, high)
    return tuple((10**decades).tolist())


def _slope(
    model: nn.Module, x: Tensor, reference: Sequence[Tensor], at: Tensor, distance: Distance, *, as_decades: bool
) -> Tensor:
    """The gradient of the mean distance, with respect to factors or to their decimal logarithms."""
    with torch.enable_grad():
        free = at.detach().to(x.device).clone().requires_grad_()
        factors = 10**free if as_decades else free
        return gradient(distance(_features(model, x, factors), reference).mean(), free).detach().cpu()


def _features(model: nn.Module, x: Tensor, factors: Factors) -> list[Tensor]:
    """Of every block, (batch, tokens, channels)."""
    with scaled_attention(model, factors), block_features(model) as features:
        model(x)
    return [token_sequence(model, each) for each in features]


def _ball_of(attack: Attack) -> Threat:
    """The threat of the innermost search."""
    inner = getattr(attack, "attack", None) or next(iter(getattr(attack, "attacks", ())), None)
    if inner is not None:
        return _ball_of(inner)
    threat: Threat = attack.threat  # type: ignore[attr-defined]
    return threat


def aas(
    attack: Attack,
    images: int = 1280,
    steps: int = 10,
    pace: float = 0.3,
    distance: str = "lpips",
    select: bool = True,
    paper_style: bool = True,
) -> Attack:
    return AAS(attack, False, False, images, steps, pace, distance, select, paper_style)


def aas_bpda(
    attack: Attack,
    images: int = 1280,
    steps: int = 10,
    pace: float = 0.3,
    distance: str = "lpips",
    select: bool = True,
    paper_style: bool = True,
) -> Attack:
    return AAS(attack, True, False, images, steps, pace, distance, select, paper_style)


def aas_paper(attack: Attack, images: int = 1280, steps: int = 10) -> Attack:
    return AAS(attack, False, True, images, steps, paper_style=True)


def scale(attack: Attack, factor: float = 0.01, paper_style: bool = True) -> Attack:
    return Rescaled(attack, factor, paper_style=paper_style)
