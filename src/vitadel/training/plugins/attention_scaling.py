"""AAS-AT: training with attention factors that change every few epochs (Jain & Dutta, CVPR 2024, section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.factors import (
    METHODS,
    FactorSearch,
    random_factors,
    search_factors,
    search_factors_as_printed,
)
from vitadel.attacks.attention_scaling.objectives import DISTANCES
from vitadel.attacks.losses import cross_entropy
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError, check_known
from vitadel.instrument.hooks import frozen
from vitadel.quantities import AT_LEAST_ONE, BETWEEN, POSITIVE, check_ranges
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import Training, warn_late_start

SEARCHES = (*METHODS, "printed", "random", "fixed")


@runtime_checkable
class HasScalableClassifier(Protocol):
    """A model around a classifier whose attention factors may change in training."""

    def scalable_classifier(self) -> Classifier:
        """The classifier; raises `UserError` if its factors must stay."""
        ...


@dataclass
class AttentionScaling:
    """Multiplies the scores of every softmax attention by a factor, which is a part of the model.

    Factors start at 1. Before epochs `gap`, 2 * `gap`, ... new ones are searched on `images` training images. `search`:

    - `ascent`: from a random start in [0.01, 1], gradient ascent with `steps` steps of size `pace` on the `distance`
      from the features with the previous factors;
    - `grid`: from factors that bring the measured gaps of the scores to where the softmax has a slope, one attention
      after another, by values of the distance, also where the softmax is saturated; `both`: then the ascent from there;
    - `printed`: the paper's algorithm 1 from the previous factors, with additive noise and equation 3;
    - `random`: a control, log-uniform factors between `smallest` and 1;
    - `fixed`: a control, the factors stay as they are: 1, unless the model came with others.

    Weights do not change meanwhile; the change of the clean loss is logged. Objective, attack and weight averages see
    the model with its factors.

    The ascent ends at the bounds, because features are farthest without any attention. With the attack's 1e-7 as
    `smallest`, attention would be switched off and pass no gradient until the next search.
    """

    gap: int = 10
    images: int = 3200
    steps: int = 10
    pace: float = 0.3
    distance: str = "lpips"
    smallest: float = 0.01
    search: str = "ascent"

    def __post_init__(self) -> None:
        check_known("search", self.search, SEARCHES)
        check_known("distance", self.distance, DISTANCES)
        counts = dict.fromkeys(("gap", "images", "steps"), AT_LEAST_ONE)
        check_ranges(self, **counts, pace=POSITIVE, smallest=BETWEEN)

    def length_warning(self, epochs: int) -> str | None:
        return warn_late_start(self.gap, epochs)

    def check_length(self, epochs: int) -> None:
        if self.gap > epochs and self.search != "fixed":
            raise UserError(
                f"a gap of {self.gap} epochs is longer than the training of {epochs}, so no factors would ever be "
                "searched; set a shorter gap, train for more epochs than the gap has, or leave attention_scaling out"
            )

    def check_model(self, model: Classifier) -> None:
        if not attentions_of(model):
            raise UserError(
                f"{type(model.backbone).__name__} has no softmax attention to scale; train another model, or without "
                "attention_scaling"
            )

    def prepare(self, model: nn.Module) -> None:
        """Add factors of 1 to a model that has none, before optimizer, averages and processes see it."""
        classifier = _classifier(model)
        self.check_model(classifier)
        if classifier.attention_factors is None:
            classifier.set_attention_factors([1.0] * len(attentions_of(classifier)))

    def before_epoch(self, run: Training) -> None:
        classifier = _classifier(run.model)
        if run.epoch == 0 or run.epoch % self.gap or self.search == "fixed":
            return
        batches = run.training_images(self.images)
        # Searched by the main process only: processes that round differently would train different models.
        factors, jump = run.processes.on_main(lambda: self._search(run.model, classifier, batches, run))
        classifier.set_attention_factors(factors)
        run.log({"scales_mean": sum(factors) / len(factors), "scales_min": min(factors), "loss_jump": jump})

    def _search(
        self, model: nn.Module, classifier: Classifier, batches: Iterable[tuple[Tensor, Tensor]], run: Training
    ) -> tuple[tuple[float, ...], float]:
        """New factors, and the change of the mean loss on the first batch."""
        held = classifier.record.attention_factors
        assert held is not None, "`prepare` was not called"
        rng = SampleRNG.of_samples(run.seed, [run.epoch]).stream("attention scaling")
        first = next(iter(batches), None)
        if first is None:
            raise UserError("attention scaling needs training images for its search, and there are none")
        with frozen(model):
            before = _loss(model, *first)
            try:
                # The ascent multiplies the model's factors; from ones it finds the factors themselves.
                classifier.set_attention_factors([1.0] * len(held))
                found = self._find(model, batches, rng, held)
                classifier.set_attention_factors(found)
                return found, _loss(model, *first) - before
            finally:
                classifier.set_attention_factors(held)

    def _find(
        self, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], rng: SampleRNG, held: Sequence[float]
    ) -> tuple[float, ...]:
        if self.search == "random":
            return random_factors(model, rng, self.smallest)
        if self.search == "printed":
            return search_factors_as_printed(model, batches, rng, self.steps, held, self.smallest)
        search = FactorSearch(self.search, self.distance, self.steps, self.pace, self.smallest)
        return search_factors(model, batches, rng, search, held)


def _classifier(model: nn.Module) -> Classifier:
    """The classifier with the factors: the model itself, or the frozen one inside."""
    if isinstance(model, HasScalableClassifier):
        return model.scalable_classifier()
    if not isinstance(model, Classifier):
        raise UserError(f"attention scaling trains a vitadel Classifier, got {type(model).__name__}; use vitadel.wrap")
    return model


@torch.no_grad()
def _loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(cross_entropy(model(x), y).double().mean())
