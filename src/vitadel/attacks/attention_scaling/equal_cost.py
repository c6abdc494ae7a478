"""Attacks of the same cost as one through scaled attention: did the scaling find more, or only the passes?"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

from torch import Tensor, nn

from vitadel.attacks.attention_scaling.aas import Rescaled
from vitadel.attacks.attention_scaling.factors import random_factors
from vitadel.attacks.goals import Surrogate, View, deployed
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

_SMALLEST = 1e-3  # of random factors: the range of the uniform ones


def control_attacks(attack: Rescaled, model: nn.Module, seed: int) -> list[tuple[str, Attack]]:
    """Plain restarts with at least as many passes, the same with gradients in float64, and random factors."""
    times = 2
    while _cost(Restarts(attack.attack, times)) < _cost(replace(attack, paper_style=False)):
        times += 1
    plain = Restarts(attack.attack, times)
    draws = SampleRNG.of_samples(seed, [0]).stream("aas controls")
    drawn = [random_factors(model, draws.stream("draw", number), _SMALLEST) for number in range(1 + len(attack.others))]
    through = replace(attack, factors=drawn[0], others=tuple(drawn[1:]), paper_style=False, controls=False)
    return [
        (f"{times} plain runs", plain),
        ("random factors", replace(through, calibration=None)),
        (f"{times} plain runs in float64", InFloat64(plain)),
    ]


def _cost(attack: Attack) -> int:
    """In forward passes: a backward pass takes about as long as two."""
    gradients, forwards = attack.passes()
    return 3 * gradients + forwards


@dataclass(frozen=True)
class InFloat64:
    """An attack with the gradients of a copy of the model in float64; the deployed model gives the verdicts."""

    attack: Attack

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        double = copy.deepcopy(model).double()
        own = View(deployed(model), lambda inner, z: inner(z.to(x.dtype)))
        try:
            z = self.attack(Surrogate(double, own), x.double(), y, rng)
        except RuntimeError as fault:
            raise UserError(
                f"this model does not run in float64 ({str(fault).splitlines()[0]}), which controls=true needs; leave "
                "out controls"
            ) from fault
        return z.to(x.dtype)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients, forwards * 2 + gradients
