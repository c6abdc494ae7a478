"""The factors that AAS finds for a model's attention, found once per study and saved in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.goals import Changed, Surrogate
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import needs_calibration
from vitadel.evaluation.engine.stages import rules_of
from vitadel.instrument.attention import scaled_attention
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.run import StudyContext, StudyRequest
from vitadel.types import Attack

_STAGE = "factors"


@dataclass(frozen=True)
class ScaledRequest(StudyRequest):
    """A study of an attack through scaled attention; `images` of other data serve to find the factors."""

    attack: str = "pgd-20"
    images: int = 1280
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images < 1:
            raise UserError(f"--images must be at least 1, got {self.images}")
        self.search()

    def search(self) -> Attack:
        """The attack, which must need no calibration and have no threat model of its own."""
        attack = make(self.attack, eps=self.eps, norm=self.norm)
        if needs_calibration(attack) or rules_of(attack) is not None:
            raise UserError(
                f"'{self.attack}' cannot run through scaled attention here; use a plain attack, e.g. pgd-20"
            )
        return attack


def find_factors(study: StudyContext, request: ScaledRequest) -> tuple[float, ...]:
    """One factor per softmax attention, from images that are not studied; a resumed study reads them."""
    processes, cache = study.context.processes, study.context.cache
    saved = processes.on_main(lambda: cache.find(_STAGE, 0))
    if saved is not None:
        return tuple(saved["factors"].tolist())
    attack = AAS(PGD(study.threat), images=request.images)
    factors = cast(tuple[float, ...], cast(Rescaled, study.calibrate(attack, request.calibration)).factors)
    assert len(factors) == len(attentions_of(study.model))
    if processes.is_main:
        cache.save(_STAGE, 0, {"factors": np.asarray(factors, np.float64)})
    processes.wait()
    return factors


def scaled(model: nn.Module, factors: Sequence[float]) -> nn.Module:
    """The model with scaled attention, as a model of its own."""
    return Changed(model, lambda inner: scaled_attention(inner, tuple(factors)))


@dataclass(frozen=True)
class ThroughScaled:
    """An attack on the model with scaled attention; samples leave when the deployed model is fooled.

    The first half of `aas+`, with the same random numbers: the second, the plain attack, does not depend on factors.
    """

    attack: Attack
    factors: tuple[float, ...]

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        return self.attack(Surrogate(scaled(model, self.factors), model), x, y, rng.stream("rescaled"))

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients, 2 * forwards + gradients  # every pass of the scaled model needs one of the deployed model
