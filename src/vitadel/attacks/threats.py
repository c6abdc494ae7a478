"""Threats: norm balls around the clean image, intersected with the box [0, 1].

A threat defines its geometry in four small methods, so a new norm is one class and not a new attack.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vitadel.attacks.per_sample import per_sample
from vitadel.errors import UserError, unknown_name
from vitadel.quantities import quantity_text
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

_TINY = 1e-12
_HALF = (torch.float16, torch.bfloat16)  # so coarse that rounding alone can leave the ball
_NEWTON_STEPS = 100  # about ten are used; see `shift_to_budget`
_WALL = 1e-5  # a pixel this close to 0 or 1 counts as 0 or 1: `_tightened` moves pixels by less


def _tightened(z: Tensor, x: Tensor, eps: float, size: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Shrink perturbations that float rounding put outside the budget towards `x`."""
    length = size(z, x)
    shrink = torch.where(length > eps, eps / length.clamp(min=_TINY) * (1 - 1e-6), torch.ones_like(length))
    return torch.where(per_sample(shrink, z) < 1, x + (z - x) * per_sample(shrink, z), z)


def _rounded_towards(x: Tensor, z: Tensor, reach: Tensor) -> Tensor:
    """`z`, computed in float64, in the type of `x`, no pixel farther from `x` than `reach`.

    Errors of rounding to nearest would add up over a hundred thousand pixels to more than the budget's tolerance.
    """
    near = z.to(x.dtype)
    return torch.where((near.double() - x.double()).abs() > reach, torch.nextafter(near, x), near)


@dataclass(frozen=True)
class Linf:
    """Every pixel may change by at most `eps`."""

    eps: float

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        if x.dtype in _HALF:
            start = x.double()
            inside = z.double().clamp(start - self.eps, start + self.eps).clamp(0, 1)
            return _rounded_towards(x, inside, torch.full_like(start, self.eps))
        return z.clamp(x - self.eps, x + self.eps).clamp(0, 1)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        start = rng.stream("linf start")
        noise = start.signs(*x.shape[1:]) if surface else start.uniform(*x.shape[1:]) * 2 - 1
        return self.project(x + self.eps * noise.to(x.dtype), x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        return grad.sign()

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        return (z.double() - x.double()).flatten(1).abs().amax(1)


@dataclass(frozen=True)
class L2:
    """The perturbation's Euclidean length is at most `eps`."""

    eps: float

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        # Clipping to a box that contains x never increases the distance to x: first the ball, then the box.
        delta = (z - x).double() if x.dtype in _HALF else z - x
        length = torch.linalg.vector_norm(delta.flatten(1), dim=1).clamp(min=_TINY)
        kept = delta * per_sample((self.eps / length).clamp(max=1), delta)
        if x.dtype in _HALF:
            return _rounded_towards(x, (x.double() + kept).clamp(0, 1), kept.abs())
        inside = x + kept
        return _tightened(inside.clamp(0, 1), x, self.eps, self.size)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        direction = rng.stream("l2 start").normal(*x.shape[1:]).to(x.dtype)
        radius = self.eps * (1 if surface else rng.stream("l2 radius").uniform())
        length = torch.linalg.vector_norm(direction.flatten(1), dim=1).clamp(min=_TINY)
        return self.project(x + direction * per_sample(radius / length, x), x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        return grad / per_sample(torch.linalg.vector_norm(grad.flatten(1), dim=1).clamp(min=_TINY), grad)

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm((z.double() - x.double()).flatten(1), dim=1)
        return length


@dataclass(frozen=True)
class L1:
    """The absolute changes of all pixels add up to at most `eps`; steps move few pixels (Tramer & Boneh 2019).

    `sparsity` is the share of pixels that one step moves (0: one pixel, the steepest ascent). The projection is onto
    the intersection of ball and box: one after the other would lose most of the budget (Croce & Hein 2021,
    arXiv:2103.01208).
    """

    eps: float
    sparsity: float = 0.05

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        # The nearest point is sign(d) * clip(|d| - shift, 0, room), with the smallest shift >= 0 that fits the budget.
        delta, start = (z - x).flatten(1).double(), x.flatten(1).double()
        reach, room = delta.abs(), torch.where(delta > 0, 1 - start, start)
        shift = shift_to_budget(reach, room, self.eps)
        kept = torch.minimum((reach - shift[:, None]).clamp(min=0), room)
        return _rounded_towards(x, (start + kept * delta.sign()).view_as(x), kept.view_as(x))

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        flat = math.prod(x.shape[1:])
        spread = -torch.log1p(-rng.stream("l1 start").uniform(flat).double())
        direction = spread / spread.sum(1, keepdim=True) * rng.stream("l1 signs").signs(flat)
        radius = self.eps * (1 if surface else rng.stream("l1 radius").uniform()[:, None])
        return self.project(x + (direction * radius).to(x.dtype).view_as(x), x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        stuck = ((z >= 1 - _WALL) & (grad > 0)) | ((z <= _WALL) & (grad < 0))
        useful = grad.masked_fill(stuck, 0).flatten(1)
        count = max(1, round(self.sparsity * useful.shape[1]))
        strongest = useful.abs().topk(count, dim=1).indices
        # In proportion to the gradient: the projection takes the same from every pixel, so with equal steps it would
        # never move the budget to the pixel that matters most.
        step = torch.zeros_like(useful).scatter(1, strongest, useful.gather(1, strongest))
        return (step / step.abs().sum(1, keepdim=True).clamp(min=_TINY)).view_as(grad)

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        return (z.double() - x.double()).flatten(1).abs().sum(1)


@dataclass(frozen=True)
class L0:
    """At most `eps` values change, of all channels together, each by as much as the box allows."""

    eps: float

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        inside, start = z.clamp(0, 1).flatten(1), x.flatten(1)
        change = (inside - start).abs()
        largest = change.topk(min(int(self.eps), change.shape[1]), dim=1).indices
        return start.scatter(1, largest, inside.gather(1, largest)).view_as(x)

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        start, count = x.flatten(1), math.prod(x.shape[1:])
        chosen = rng.stream("l0 places").permutation(count)[:, : int(self.eps)]
        values = rng.stream("l0 values").uniform(count).to(x.dtype)
        return start.scatter(1, chosen, (values.round() if surface else values).gather(1, chosen)).view_as(x)

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        """One value, by the gradient, that the box lets change most."""
        flat, place = grad.flatten(1), z.flatten(1)
        gain = flat.abs() * torch.where(flat > 0, 1 - place, place)
        best = gain.argmax(1, keepdim=True)
        return torch.zeros_like(flat).scatter(1, best, flat.sign().gather(1, best)).view_as(grad)

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        return (z != x).flatten(1).sum(1).double()


def shift_to_budget(reach: Tensor, room: Tensor, eps: float | Tensor) -> Tensor:
    """The smallest shift >= 0 with sum(clip(reach - shift, 0, room)) <= eps, one per row; `eps` may differ by row.

    The sum is a piecewise linear, decreasing function of the shift, so Newton's method finds the solution in about ten
    steps even for long rows; where it leaves the bracket of the solution, the bracket is halved.
    """
    low, high = torch.zeros_like(reach[:, 0]), reach.amax(1)
    shift = low
    for _ in range(_NEWTON_STEPS):
        left = reach - shift[:, None]
        over = torch.minimum(left.clamp(min=0), room).sum(1) - eps
        open_ = (over > 1e-12 * eps) | ((over < -1e-12 * eps) & (shift > 0))
        if not bool(open_.any()):
            break
        low, high = torch.where(over > 0, shift, low), torch.where(over > 0, high, shift)
        slope = ((left > 0) & (left < room)).sum(1).clamp(min=1)
        newton = shift + over / slope
        halved = (low + high) / 2
        shift = torch.where(open_, torch.where((newton > low) & (newton < high), newton, halved), shift)
    return shift


def dual_order(threat: Threat) -> float:
    """The order of the dual norm, which measures how steep a linear function is for this ball."""
    if isinstance(threat, L1):
        return math.inf
    return 2.0 if isinstance(threat, L2) else 1.0


NORMS: dict[str, Callable[[float], Threat]] = {"linf": Linf, "l2": L2, "l1": L1}
"""The norms that attacks support unless the registry says otherwise."""

ALL_NORMS: dict[str, Callable[[float], Threat]] = NORMS | {"l0": L0}


def make_threat(norm: str, eps: float) -> Threat:
    """The threat of a norm by name; refuses budgets that make no sense for pixels in [0, 1]."""
    if norm not in ALL_NORMS:
        raise unknown_name("norm", norm, ALL_NORMS)
    if eps < 0:
        raise UserError(f"eps must not be negative, got {quantity_text(eps)}; pixels are in [0, 1], so try 8/255")
    if norm == "linf" and eps > 1:
        raise UserError(
            f"eps {eps:g} is larger than the whole pixel range: pixels are in [0, 1] here, not in 0..255. "
            f"Did you mean {eps:g}/255?"
        )
    if norm == "l0" and eps != round(eps):
        raise UserError(f"eps of l0 is a number of values that may change, so a whole number, got {quantity_text(eps)}")
    return ALL_NORMS[norm](eps)
