"""Steppers: how a search moves from a gradient to its next point, before projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.attacks.per_sample import keep_samples, per_sample
from vitadel.attacks.threats import Linf
from vitadel.errors import UserError
from vitadel.types import Step, Threat

__all__ = ["Dropping", "Fading", "Filling", "Momentum", "Scripted", "Steepest", "usual_length"]


def usual_length(threat: Threat, steps: int) -> float:
    """The default step length: 2.5 * eps / steps, for Linf at least the smaller of 2/255 and eps / 4.

    At 8/255 that is the papers' 2/255. A fixed 2/255 cannot cross a large ball, and in a small one it jumps from corner
    to corner: both would look like robustness.
    """
    least = min(2 / 255, threat.eps / 4) if isinstance(threat, Linf) else 0.0
    return max(least, 2.5 * threat.eps / steps)


@dataclass(frozen=True)
class _SteepestSteps:
    """Steps along the direction of steepest ascent; the last of `lengths` repeats."""

    threat: Threat
    lengths: tuple[float, ...]

    keep = keep_samples

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        return z + self.lengths[min(turn, len(self.lengths) - 1)] * self.threat.ascent(grad, z)


@dataclass(frozen=True)
class Steepest:
    """Steps of one length along the norm's direction of steepest ascent; the default is `usual_length`."""

    length: float | None = None

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        length = usual_length(threat, steps) if self.length is None else self.length
        return _SteepestSteps(threat, (length,))


@dataclass(frozen=True)
class Scripted:
    """Steepest steps with the given lengths, in units of eps."""

    lengths: tuple[float, ...]

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        return _SteepestSteps(threat, tuple(length * threat.eps for length in self.lengths))


@dataclass(frozen=True)
class Dropping:
    """Steepest steps of `reach` times eps, ten times shorter after each share of the steps in `drops`, as in GAMA."""

    reach: float = 2.0
    drops: tuple[float, ...] = (0.6, 0.85)

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        passed = [sum(turn >= drop * steps for drop in self.drops) for turn in range(steps)]
        return _SteepestSteps(threat, tuple(self.reach * threat.eps * 0.1**count for count in passed))


@dataclass(frozen=True)
class _Filling:
    eps: float

    keep = keep_samples

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        slope, here = grad.flatten(1).double(), z.flatten(1).double()
        steepest, order = slope.abs().sort(dim=1, descending=True, stable=True)
        room = torch.where(slope > 0, 1 - here, here).gather(1, order) * (steepest > 0)
        spent = torch.minimum(room, (self.eps - (room.cumsum(1) - room)).clamp(min=0))
        step = torch.zeros_like(here).scatter(1, order, spent) * slope.sign()
        return (here + step).to(z.dtype).view_as(z)


@dataclass(frozen=True)
class Filling:
    """The whole L1 budget in one step: pixels go to black or white, largest gradient first, until it is spent.

    This maximizes a linear function over ball and box; a single pixel, the ball's corner, takes at most 1.
    """

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        return _Filling(threat.eps)


@dataclass
class _MomentumSteps:
    threat: Threat
    length: float
    decay: float
    memory: Tensor

    keep = keep_samples

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        size = grad.flatten(1).abs().mean(1).clamp(min=1e-12)
        self.memory = self.decay * self.memory + grad / per_sample(size, grad)
        return z + self.length * self.threat.ascent(self.memory, z)


@dataclass(frozen=True)
class Momentum:
    """Ascent along a decaying sum of normalized gradients (MI-FGSM, Dong et al. 2018, arXiv:1710.06081).

    The default length is eps / steps.
    """

    decay: float = 1.0
    length: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 10:  # with more, the first gradient outweighs all later ones
            raise UserError(f"decay is the weight of earlier gradients, from 0 to 10, got {self.decay:g}; try 1")

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        length = threat.eps / steps if self.length is None else self.length
        return _MomentumSteps(threat, length, self.decay, x * 0)


@dataclass
class _FadingSteps:
    threat: Threat
    lengths: tuple[float, ...]
    keeping: float
    x: Tensor
    before: Tensor | None = None

    keep = keep_samples

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        ahead = self.threat.project(z + self.lengths[turn] * self.threat.ascent(grad, z), self.x)
        if self.before is not None:
            ahead = z + self.keeping * (ahead - z) + (1 - self.keeping) * (z - self.before)
        self.before = z
        return ahead


@dataclass(frozen=True)
class Fading:
    """Steps that shrink linearly from `reach` times eps to zero, mixed with the last step, as in MIFPE.

    A move is the share `keeping` of the new step plus the rest of the last one, which is APGD's momentum.
    """

    reach: float = 2.0
    keeping: float = 0.75

    def __post_init__(self) -> None:
        if not 0 <= self.keeping <= 1:
            raise UserError(f"keeping is the new step's share of a move, from 0 to 1, got {self.keeping:g}; try 0.75")

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        lengths = tuple(self.reach * threat.eps * (1 - turn / steps) for turn in range(steps))
        return _FadingSteps(threat, lengths, self.keeping, x)
