"""How a search moves: from a gradient to a displacement."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitadel.attacks.threats import Linf
from vitadel.types import Step, Threat

__all__ = ["Steepest", "usual_length"]


@dataclass(frozen=True)
class _SteepestStep:
    threat: Threat
    length: float

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        return z + self.length * self.threat.ascent(grad, z)

    def keep(self, chosen: Tensor) -> Step:
        return self


def usual_length(threat: Threat, steps: int) -> float:
    """2.5 * eps / steps, which can cross the ball, and for Linf at least 2/255, the papers' value.

    A fixed 2/255 alone cannot reach the far side of a large ball, which then looks like robustness.
    """
    return max(2 / 255 if isinstance(threat, Linf) else 0.0, 2.5 * threat.eps / steps)


@dataclass(frozen=True)
class Steepest:
    """Steps of one length along the norm's direction of steepest ascent; without `length`, the usual one."""

    length: float | None = None

    def start(self, threat: Threat, steps: int) -> Step:
        return _SteepestStep(threat, usual_length(threat, steps) if self.length is None else self.length)
