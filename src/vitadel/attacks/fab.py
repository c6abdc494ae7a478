"""FAB: fast adaptive boundary attack (Croce & Hein 2020, arXiv:1907.02044).

A minimum-norm attack: each step linearizes the model, projects both the current point and the clean image onto the
linearized boundary inside the box [0, 1], and moves to a point between the two projections. FAB-T follows one class at
a time and needs one gradient per step instead of one per class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import fooled, gradient
from vitadel.attacks.losses import likeliest_wrong
from vitadel.attacks.per_sample import per_sample, takes_arrays
from vitadel.attacks.threats import L1, L2, Linf, dual_order
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

_TINY = 1e-30
_NEWTON_STEPS = 60  # about 5 are used; see `_least_effort`
# The boundary is taken to lie this far beyond the tie of two logits, in units of the largest one: a search for the tie
# itself makes ever shorter steps and never reaches a point that is clearly fooled.
_CLEARLY = 2e-5
_ASSUMED_CLASSES = 10  # of `passes`, which does not know the model
_ORDERS: dict[type, float] = {Linf: math.inf, L2: 2.0, L1: 1.0}


@dataclass(frozen=True)
class FAB:
    """The smallest adversarial perturbation found, if it is inside the budget; else the clean image.

    `targets` is the number of classes to follow one after another, from the second best on the clean image down; None
    follows the class with the nearest boundary at every step, with one gradient per class. With `stop_when_fooled` a
    sample stops at its first adversarial point inside the budget; otherwise the search for a smaller one continues.
    `alpha_max` bounds the bias towards the clean image, `eta` is the overshoot beyond the boundary and `beta` the step
    back after a success. The first run starts at the clean image, further `restarts` at random points at half the size
    of the best perturbation or of the budget.
    """

    threat: Threat
    steps: int = 100
    targets: int | None = None
    restarts: int = 1
    alpha_max: float = 0.1
    eta: float = 1.05
    beta: float = 0.9
    stop_when_fooled: bool = True

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("targets", self.targets), ("restarts", self.restarts)):
            if value is not None and value < 1:
                raise UserError(f"{name} of FAB must be at least 1, got {value}")
        if not 1 <= self.eta <= 10:
            raise UserError(f"eta of FAB must be from 1 to 10, got {self.eta:g}; the paper has 1.05")
        for name, share, usual in (("alpha_max", self.alpha_max, 0.1), ("beta", self.beta, 0.9)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} of FAB must be from 0 to 1, got {share:g}; the paper has {usual}")
        if type(self.threat) not in _ORDERS:
            raise UserError(f"FAB needs the threat Linf, L2 or L1, got {type(self.threat).__name__}")

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        x = x.detach()
        if self.threat.eps == 0:
            return x.clone()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        with frozen(model), torch.no_grad():
            logits = model(x)
            wrong = fooled(model, x, logits, y)
            rivals = likeliest_wrong(logits, y)
            rounds = [rivals] if self.targets is None else list(rivals[:, : self.targets].split(1, dim=1))
            found, size = x.clone(), torch.where(wrong, 0.0, torch.inf).double()
            for restart in range(self.restarts):
                for turn, classes in enumerate(rounds):
                    place = (size > (self.threat.eps if self.stop_when_fooled else 0)).nonzero().squeeze(1)
                    if len(place) == 0:
                        break
                    part, z = x[place], x[place]
                    if restart:
                        z = self._random(part, size[place], rng[place].stream("start", restart, turn))
                    found[place], size[place] = self._search(
                        model, part, y[place], z, classes[place], found[place], size[place]
                    )
        return torch.where(per_sample(size <= self.threat.eps, x).bool(), found, x)

    def _random(self, x: Tensor, size: Tensor, rng: SampleRNG) -> Tensor:
        shape = x.shape[1:]
        noise = (rng.uniform(*shape) * 2 - 1 if self._order == math.inf else rng.normal(*shape)).to(x.dtype)
        radius = size.clamp(max=self.threat.eps) / 2 / self.threat.size(noise, torch.zeros_like(noise))
        return (x + noise * per_sample(radius, x)).clamp(0, 1)

    def _search(
        self, model: nn.Module, x: Tensor, y: Tensor, z: Tensor, classes: Tensor, found: Tensor, size: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One run from `z`: the smallest adversarial point and its size, no larger than the given ones."""
        place = torch.arange(len(x), device=x.device)  # of the samples not fooled yet
        for _ in range(self.steps):
            gap, slope, _ = nearest_boundary(model, z, y, classes, dual_order(self.threat))
            z = self._step(x, z, gap, slope)
            wrong = fooled(model, z, model(z), y)
            length = self.threat.size(z, x)
            better = wrong & (length < size[place])
            found[place[better]], size[place[better]] = z[better], length[better]
            z = torch.where(per_sample(wrong, z).bool(), x + self.beta * (z - x), z)
            rest = size[place] > self.threat.eps
            if self.stop_when_fooled and not bool(rest.all()):
                place, x, y, z, classes = place[rest], x[rest], y[rest], z[rest], classes[rest]
                if len(place) == 0:
                    break
        return found, size

    def _step(self, x: Tensor, z: Tensor, gap: Tensor, slope: Tensor) -> Tensor:
        """A point between the projections of `z` and `x` onto the plane gap + slope . (. - z) = 0, or beyond."""
        both = torch.stack([z, x]).flatten(2)
        gaps = torch.stack([gap, gap + (slope * (x - z).flatten(1)).sum(1)])
        moves = to_hyperplane(both, slope, gaps, self._order)
        lengths = torch.linalg.vector_norm(moves, ord=self._order, dim=2).clamp(min=1e-8)
        pull = (lengths[0] / (lengths[0] + lengths[1])).clamp(max=self.alpha_max)
        ends = both + self.eta * moves
        return torch.lerp(ends[0], ends[1], pull[:, None]).clamp(0, 1).view_as(x)

    @property
    def _order(self) -> float:
        return _ORDERS[type(self.threat)]

    def passes(self) -> tuple[int, int]:
        runs = self.restarts * (self.targets or 1)
        gradients = 1 if self.targets else _ASSUMED_CLASSES - 1
        return runs * self.steps * gradients, runs * self.steps + 1


def nearest_boundary(
    model: nn.Module, z: Tensor, y: Tensor, classes: Tensor, dual: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest of the linearized boundaries with `classes` (samples, number): logit gap, its flat gradient, logits.

    Only the best gradient so far is kept: the Jacobian of a thousand classes would not fit into memory.
    """
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        output = model(z)
        logits = output.to(z.dtype)
        beyond = max(_CLEARLY, torch.finfo(output.dtype).eps) * logits.detach().abs().amax(1, keepdim=True)
        gaps = logits.gather(1, classes) - logits.gather(1, y[:, None]) - beyond
        nearest = z.new_full((len(z),), torch.inf)
        gap, slope = gaps.detach()[:, 0], torch.zeros_like(z).flatten(1)
        for column in range(classes.shape[1]):
            grad = gradient(gaps[:, column], z, again=column + 1 < classes.shape[1]).flatten(1)
            here = gaps.detach()[:, column]
            distance = here.abs() / torch.linalg.vector_norm(grad, ord=dual, dim=1).clamp(min=_TINY)
            closer = distance < nearest
            nearest = torch.minimum(nearest, distance)
            gap, slope = torch.where(closer, here, gap), torch.where(closer[:, None], grad, slope)
    return gap, slope, output.detach()


def to_hyperplane(points: Tensor, slope: Tensor, gap: Tensor, order: float) -> Tensor:
    """The shortest moves in the norm of `order` (inf, 2, 1) from points in the box [0, 1] to planes, inside the box.

    `points` (sets, samples, size) with values `gap` (sets, samples) share the gradients `slope` (samples, size); the
    plane is where the value is zero. If the plane misses the box, the move ends in the box's nearest corner.
    """
    toward = -slope.sign() * gap.sign()[..., None]
    room = (toward.clamp(min=0) - toward * points).clamp(min=0)  # exactly 1 - point upwards and point downwards
    weight = slope.abs()
    scale = weight.amax(1, keepdim=True).clamp(min=_TINY)  # squares of small gradients would underflow
    weight, need = weight / scale, gap.abs() / scale.squeeze(1)
    effort = _greedy(weight, room, need) if order == 1 else _least_effort(weight, room, need, order)
    return effort * toward


def _least_effort(weight: Tensor, room: Tensor, need: Tensor, order: float) -> Tensor:
    """How far each pixel moves so that sum(weight * move) = need: equally (Linf) or by weight (L2), at most `room`.

    The sum is sum(min(t * pace, most)), a concave function of the number t, so Newton's method from 0 never overshoots
    and ends after finitely many steps: the product of slope and rest falls by a factor of four or more in each.
    """
    pace, most = (weight if order == math.inf else weight.square()), weight * room
    within = most.sum(-1) > need
    need = torch.where(within, need, 0.0)
    t = torch.zeros_like(need)
    for _ in range(_NEWTON_STEPS):
        wish = t[..., None] * pace
        rest = need - torch.minimum(wish, most).sum(-1)
        open_ = rest > 16 * torch.finfo(rest.dtype).eps * need
        if not bool(open_.any()):
            break
        incline = (pace * (wish < most)).sum(-1)
        t = torch.where(open_, t + rest / incline.clamp(min=_TINY), t)
    move = t[..., None] if order == math.inf else t[..., None] * weight
    return torch.where(within[..., None], torch.minimum(move, room), room)


def _greedy(weight: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """L1: pixels move as far as they can, the largest weight first, until the sum is reached."""
    weight, order = weight.sort(dim=1, descending=True)
    order = order.expand_as(room)
    room = room.gather(-1, order)
    done = (weight * room).cumsum(-1)
    left = need[..., None] - torch.cat([torch.zeros_like(done[..., :1]), done[..., :-1]], dim=-1)
    move = torch.minimum(left.clamp(min=0) / weight.clamp(min=_TINY), room)
    return torch.zeros_like(room).scatter(-1, order, move)


def fab(
    threat: Threat,
    steps: int = 100,
    restarts: int = 1,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
) -> Attack:
    return FAB(threat, steps, None, restarts, alpha_max, eta, beta)


def fab_t(
    threat: Threat,
    steps: int = 100,
    targets: int = 9,
    restarts: int = 1,
    alpha_max: float = 0.1,
    eta: float = 1.05,
    beta: float = 0.9,
) -> Attack:
    return FAB(threat, steps, targets, restarts, alpha_max, eta, beta)
