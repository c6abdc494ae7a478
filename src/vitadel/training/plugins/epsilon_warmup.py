"""Epsilon warm-up: eps grows over the first epochs (Debenedetti et al. 2022, arXiv:2209.07399)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vitadel.attacks.settings import at_eps
from vitadel.errors import UserError, check_known
from vitadel.quantities import NOT_NEGATIVE, check_ranges, quantity_text
from vitadel.training.interfaces import Objective, Training
from vitadel.types import Attack, Threat

_SHAPES = ("linear", "sine")


@dataclass
class EpsilonWarmup:
    """Grows eps from `start_eps` in the first `zero_epochs` + 1 epochs to full eps from epoch `epochs` on (from 0).

    eps changes once per epoch, in proportion ('linear') or as half a wave ('sine'). The paper's code divides by
    `epochs` instead of `epochs - zero_epochs`, which leaves a jump at the end unless `zero_epochs` is 0. Only eps
    grows: an attack with a given step size keeps it, and its early perturbations lie in the corners of the ball. A
    positive `start_eps` serves data with non-robust features that should never be learned.
    """

    epochs: int
    zero_epochs: int = 0
    shape: str = "linear"
    start_eps: float = 0.0

    def __post_init__(self) -> None:
        check_known("shape", self.shape, _SHAPES, " of the epsilon warm-up")
        check_ranges(self, start_eps=NOT_NEGATIVE)
        if not 0 <= self.zero_epochs < self.epochs:
            raise UserError(
                "an epsilon warm-up needs at least 1 epoch and fewer zero_epochs than epochs, got "
                f"epochs={self.epochs}, zero_epochs={self.zero_epochs}"
            )

    def length_warning(self, epochs: int) -> str | None:
        return f"takes {self.epochs} of {epochs} epochs: full eps is never reached" if self.epochs >= epochs else None

    def check_objective(self, objective: Objective, threat: Threat) -> None:
        self._check_budget(threat.eps)
        if objective.attack is None:
            raise UserError("this objective has no attack whose eps could grow; remove epsilon_warmup")
        at_eps(objective.attack, threat.eps)  # raises if the attack has no eps

    def _check_budget(self, full: float) -> None:
        if self.start_eps > full:
            raise UserError(
                f"a warm-up to {quantity_text(full)} cannot start at {quantity_text(self.start_eps)}; "
                "choose a smaller start_eps"
            )

    def eps_at(self, epoch: int, full: float) -> float:
        """The eps of an epoch; exactly `full` once the warm-up is over."""
        if epoch >= self.epochs:
            return full
        share = max(0.0, (epoch - self.zero_epochs) / (self.epochs - self.zero_epochs))
        if self.shape == "sine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.start_eps + (full - self.start_eps) * share

    def change_attack(self, run: Training, attack: Attack) -> Attack | None:
        full = run.threat.eps
        self._check_budget(full)
        eps = self.eps_at(run.epoch, full)
        run.log({"eps": eps})
        if eps == full:
            return attack
        return at_eps(attack, eps) if eps > 0 else None
