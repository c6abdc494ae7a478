"""The factors that aas finds for a model's attention, found once per study and kept in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.aas import AAS, PAPER_STYLE, Rescaled
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.attacks.surrogate import Changed, Surrogate
from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError
from vitadel.evaluation.engine.calibration import calibrate, needs_calibration
from vitadel.evaluation.engine.stages import rules_of
from vitadel.instrument.attention import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.run import Scene
from vitadel.types import Attack

__all__ = ["ThroughScaled", "found_factors", "plain_search", "scaled"]

_STAGE = "factors"


def plain_search(name: str, eps: float, norm: str) -> Attack:
    """An attack that can be sent through scaled attention: one that neither studies the model nor has its own rules."""
    attack = make(name, eps=eps, norm=norm)
    if needs_calibration(attack) or rules_of(attack) is not None:
        raise UserError(f"'{name}' cannot be sent through scaled attention here; take a plain one, such as pgd-20")
    return attack


def found_factors(scene: Scene, images: int, calibration: str | None) -> tuple[float, ...]:
    """One per softmax attention, on images that are not studied; a resumed study finds them in its folder."""
    context = scene.context
    kept = context.processes.on_main(lambda: context.cache.find(_STAGE, 0))
    if kept is not None:
        return tuple(kept["factors"].tolist())
    attack = AAS(PGD(scene.threat), images=images)
    ready = cast(Rescaled, calibrate(attack, context, scene.target, scene.verdicts.index, calibration))
    factors = cast(tuple[float, ...], ready.factors)
    assert len(factors) == len(attentions_of(context.model))
    if context.processes.is_main:
        context.cache.save(_STAGE, 0, {"factors": np.asarray(factors, np.float64)})
    context.processes.wait()
    return factors


def scaled(model: nn.Module, factors: Sequence[float]) -> nn.Module:
    """The model with scaled attention, taken for one of its own."""
    return Changed(model, lambda inner: scaled_attention(inner, tuple(factors)))


@dataclass(frozen=True)
class ThroughScaled:
    """An attack on the model with scaled attention, alone; samples leave when the deployed model is fooled.

    The first half of `aas+`, with the same random numbers: the second, the plain attack, does not depend on factors.
    """

    attack: Attack
    factors: tuple[float, ...]

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        return self.attack(Surrogate(scaled(model, self.factors), model), x, y, rng.stream("rescaled"))

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """With the paper's way of counting as a note: does the scaled model, itself attacked, still give the label?"""
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        z, softened = self(model, x, y, rng), scaled(model, self.factors)
        aimed = self.attack(softened, x, y, rng.stream("rescaled"))
        with frozen(model), torch.no_grad():
            return z, {PAPER_STYLE: softened(aimed).argmax(1) == y}

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # Every look at the scaled model needs one at the deployed one; then the search that counts as the paper does.
        return 2 * gradients, 3 * forwards + gradients + 1
