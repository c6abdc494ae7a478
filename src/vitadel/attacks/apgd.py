"""Auto-PGD: a search that chooses its own step sizes (Croce & Hein 2020, arXiv:2003.01690; L1: 2021, arXiv:2103.01208).

Steps start as long as the ball is wide and shrink, per sample, when the climb stalls; whoever shrinks them goes back to
the best point seen. In L1 the number of pixels that a step moves adapts as well, and the ball itself narrows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, fooled, gradient
from vitadel.attacks.losses import dlr, lead, likeliest_wrong, targeted_dlr
from vitadel.attacks.threats import L1, Linf, per_sample
from vitadel.attacks.wrappers import repeated
from vitadel.backbones.model_checks import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Attack, Goal, Threat

__all__ = ["APGD", "OverTargets", "TowardsClass", "TowardsRank", "apgd_ce", "apgd_dlr", "apgd_t", "checkpoints"]

_WALL = 1e-5  # nearer to black or white than this counts as there
_USUAL = 0.75  # the paper's rho and momentum
_ROUNDING = 1e-7  # what may be left of a pixel's change that a projection took back


def checkpoints(steps: int) -> tuple[int, ...]:
    """After how many iterations the step sizes are reviewed: windows of 22 % of `steps`, each 3 % shorter, down to 6 %.

    Only those before the end, where a review still changes something; whole numbers, so that nothing depends on how
    0.22 is rounded.
    """
    window, shorter, least = (max(percent * steps // 100, 1) for percent in (22, 3, 6))
    reviews, turn = [], window
    while turn < steps:
        reviews.append(turn)
        window = max(window - shorter, least)
        turn += window
    return tuple(reviews)


def _start(threat: Threat, x: Tensor, rng: SampleRNG) -> Tensor:
    """A random start as the papers have it: as far out as the ball allows, before the box cuts it."""
    if isinstance(threat, L1):
        # Noise far outside the ball: its nearest point in ball and box changes few pixels, as good L1 steps do.
        return threat.project(x + rng.normal(*x.shape[1:]).to(x.dtype), x)
    if isinstance(threat, Linf):
        noise = rng.uniform(*x.shape[1:]) * 2 - 1
        reach = threat.eps / noise.flatten(1).abs().amax(1).clamp(min=1e-12)
        return threat.project(x + per_sample(reach, x) * noise.to(x.dtype), x)
    return threat.random(x, rng, surface=True)


@dataclass(frozen=True)
class _Standing:
    """The samples not fooled yet: what to maximise, their clean images and their places in the batch."""

    aim: Aim
    x: Tensor
    place: Tensor

    def keep(self, chosen: Tensor) -> _Standing:
        return _Standing(self.aim.keep(chosen), self.x[chosen], self.place[chosen])


class _Pace(Protocol):
    """How far a climb steps, and who turns back; its tensors hold one entry per sample still standing."""

    def move(self, z: Tensor, grad: Tensor, x: Tensor, turn: int) -> Tensor: ...

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, standing: _Standing, turn: int) -> Tensor:
        """Take note of the newest values, and say who goes back to the best point; `best` is the whole batch's."""
        ...

    def keep(self, chosen: Tensor) -> _Pace: ...


@dataclass
class _Halving:
    """Steps with momentum, halved where few of them helped or where the best value no longer grows (Linf, L2)."""

    threat: Threat
    reviews: tuple[int, ...]
    rho: float
    momentum: float
    previous: Tensor
    length: Tensor
    rises: Tensor
    last_value: Tensor
    last_best: Tensor
    halved: Tensor
    window: int = 0

    @classmethod
    def start(cls, threat: Threat, steps: int, rho: float, momentum: float, z: Tensor) -> _Halving:
        zero = torch.zeros(len(z), dtype=torch.float64, device=z.device)
        return cls(
            threat,
            checkpoints(steps),
            rho,
            momentum,
            previous=z,
            length=zero + 2 * threat.eps,
            rises=zero.clone(),
            last_value=zero + torch.inf,
            last_best=zero + torch.inf,
            # As if halved before: "the best value did not grow since the last review" needs a last review.
            halved=torch.ones_like(zero, dtype=torch.bool),
        )

    def move(self, z: Tensor, grad: Tensor, x: Tensor, turn: int) -> Tensor:
        ahead = self.threat.project(z + per_sample(self.length, z) * self.threat.ascent(grad, z), x)
        share = 1.0 if turn == 0 else self.momentum
        moved = self.threat.project(z + share * (ahead - z) + (1 - share) * (z - self.previous), x)
        self.previous = z  # where the move came from, also when a review then sends the sample elsewhere
        return moved

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, standing: _Standing, turn: int) -> Tensor:
        # The first vote compares with the value at the start. (The authors' code compares it with zero, a row not yet
        # written, which makes it a sure rise for the cross-entropy and a sure fall for the DLR loss.)
        self.rises += value > self.last_value
        self.last_value = value
        self.window += turn > 0
        if turn not in self.reviews:
            return torch.zeros_like(self.halved)
        stalled = ~self.halved & (best_value <= self.last_best)
        self.halved = (self.rises <= self.rho * self.window) | stalled
        self.length = torch.where(self.halved, self.length / 2, self.length)
        self.last_best, self.rises, self.window = best_value, torch.zeros_like(self.rises), 0
        return self.halved

    def keep(self, chosen: Tensor) -> _Halving:
        return replace(
            self,
            previous=self.previous[chosen],
            length=self.length[chosen],
            rises=self.rises[chosen],
            last_value=self.last_value[chosen],
            last_best=self.last_best[chosen],
            halved=self.halved[chosen],
        )


@dataclass
class _Thinning:
    """Equal steps in the strongest pixels only, as many as two thirds of what the best point changes (L1).

    While the best point keeps getting sparser, steps are as long as the ball is wide; otherwise they shrink.
    """

    threat: L1
    every: int
    length: Tensor
    changed: Tensor
    count: Tensor

    @classmethod
    def start(cls, threat: L1, every: int, z: Tensor, x: Tensor) -> _Thinning:
        length = torch.full((len(z),), float(threat.eps), dtype=torch.float64, device=z.device)
        return cls(threat, every, length, *_changed_and_to_move(z, x))

    def move(self, z: Tensor, grad: Tensor, x: Tensor, turn: int) -> Tensor:
        slope, here = grad.flatten(1), z.flatten(1)
        stuck = ((here >= 1 - _WALL) & (slope > 0)) | ((here <= _WALL) & (slope < 0))
        ranked = slope.abs().masked_fill(stuck, 0).topk(int(self.count.max()), dim=1).values
        step = slope.sign() * (slope.abs() >= ranked.gather(1, self.count[:, None] - 1))
        # Pixels at the end of their room are pushed on, or the projection would take from them, but they are not among
        # the counted ones (in the paper they are: once they are all that a step moves, the search stands still).
        each = self.length / (step.abs() * ~stuck).sum(1).clamp(min=1)
        return self.threat.project(z + per_sample(each, z) * step.view_as(z), x)

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, standing: _Standing, turn: int) -> Tensor:
        if turn == 0 or turn % self.every:
            return torch.zeros_like(self.count, dtype=torch.bool)
        changed, count = _changed_and_to_move(best[standing.place], standing.x)
        sparser = changed < 0.95 * self.changed
        shorter = (self.length / 1.5).clamp(min=self.threat.eps / 10)
        self.length = torch.where(sparser, torch.full_like(shorter, self.threat.eps), shorter)
        self.changed, self.count = changed, count
        return sparser

    def keep(self, chosen: Tensor) -> _Thinning:
        return replace(self, length=self.length[chosen], changed=self.changed[chosen], count=self.count[chosen])


def _changed_and_to_move(z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """How many pixels differ from the clean image, and how many the next steps move (a fifth of all if none does).

    Rounded down: rounded up, two changed pixels would stay two for ever, and the budget of a linear model, which
    belongs into one, would never get there.
    """
    pixels = x[0].numel()
    changed = ((z - x).abs() > _ROUNDING).flatten(1).sum(1)
    none = changed == 0
    count = torch.where(none, torch.full_like(changed, pixels // 5), changed * 2 // 3)
    return torch.where(none, torch.full_like(changed, pixels), changed), count.clamp(min=1)


@dataclass(frozen=True)
class _Phase:
    """A stretch of iterations inside one ball; the first of them is number `first` of the whole search."""

    threat: Threat
    first: int
    steps: int


@dataclass(frozen=True)
class APGD:
    """Climb the goal with step sizes that adapt to each sample.

    With `stop_when_fooled` a sample leaves at its first adversarial iterate; what never gets there, and every sample
    without it, comes back at the point of the highest value. `rho` is the share of steps that must help for the length
    to stay, `momentum` the weight of the new direction against the last one; both are for norms other than L1.
    """

    threat: Threat
    goal: Goal = field(default_factory=OnLogits)
    steps: int = 100
    random_start: bool = True
    stop_when_fooled: bool = True
    rho: float = _USUAL
    momentum: float = _USUAL

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"an attack needs at least 1 step, got {self.steps}")
        for name, value in (("rho", self.rho), ("momentum", self.momentum)):
            if not 0 <= value <= 1:
                raise UserError(f"{name} must lie between 0 and 1, got {value:g}; the paper has 0.75")
        if isinstance(self.threat, L1) and (self.rho, self.momentum) != (_USUAL, _USUAL):
            raise UserError("rho and momentum do nothing in L1, where steps adapt by another rule; leave them out")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.search(model, x, y, rng)[0]

    def search(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None, right: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The attack's images, and the places of the samples that it has not fooled: nobody need look again.

        With `right` the clean images are known to be classified as labelled.
        """
        check_pixels(x)
        x = x.detach()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        phases = self._phases()
        with frozen(model), torch.no_grad():
            standing = _Standing(self.goal(model, x, y), x, torch.arange(len(x), device=x.device))
            if self.random_start:
                best = _start(phases[0].threat, x, rng.stream("start"))
                if self.stop_when_fooled and len(phases) > 1 and not right:
                    standing = _without_wrong_from_the_start(standing, best)
            else:
                best = x.clone()
            for phase in phases:
                standing = self._climb(phase, standing, best)
        return best, standing.place

    def _phases(self) -> tuple[_Phase, ...]:
        """One ball, or in L1 three: of 3, 2 and 1 times eps for 30, 30 and the last 40 % of the iterations."""
        third = 3 * self.steps // 10
        if not isinstance(self.threat, L1) or third == 0:
            return (_Phase(self.threat, 0, self.steps),)
        large, larger = (replace(self.threat, eps=times * self.threat.eps) for times in (2, 3))
        return (
            _Phase(larger, 0, third),
            _Phase(large, third, third),
            _Phase(self.threat, 2 * third, self.steps - 2 * third),
        )

    def _climb(self, phase: _Phase, standing: _Standing, best: Tensor) -> _Standing:
        """Go on from `best`, write what is better there, and return who is left."""
        if len(standing.place) == 0:
            return standing
        z = phase.threat.project(best[standing.place], standing.x)
        best[standing.place] = z
        best_value = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=z.device)
        best_grad, pace = torch.zeros_like(z), self._pace(phase, z, standing.x)
        for turn in range(phase.steps + 1):
            last = turn == phase.steps  # its value counts, but nobody moves on from there: no backward
            with torch.enable_grad():
                z.requires_grad_(not last)
                values, fooled = standing.aim.look(z, (phase.first + turn) / self.steps)
                leaving = self._leaving(phase, fooled, z.detach(), standing.x)
                if bool(leaving.all()):
                    best[standing.place] = z.detach()
                    return standing.keep(~leaving)
                grad = gradient(values, z)
            z, value = z.detach(), values.detach().double()
            if bool(leaving.any()):
                best[standing.place[leaving]] = z[leaving]
                rest = ~leaving
                standing, pace = standing.keep(rest), pace.keep(rest)
                z, value, grad = z[rest], value[rest], grad[rest]
                best_value, best_grad = best_value[rest], best_grad[rest]
            better = value > best_value
            best[standing.place[better]] = z[better]
            if last:
                break
            best_grad[better] = grad[better]
            best_value = torch.where(better, value, best_value)
            back = pace.review(value, best_value, best, standing, turn)
            z[back], grad[back] = best[standing.place[back]], best_grad[back]
            z = pace.move(z, grad, standing.x, turn)
        return standing

    def _pace(self, phase: _Phase, z: Tensor, x: Tensor) -> _Pace:
        if isinstance(phase.threat, L1):
            return _Thinning.start(phase.threat, max(4 * self.steps // 100, 1), z, x)
        return _Halving.start(phase.threat, phase.steps, self.rho, self.momentum, z)

    def _leaving(self, phase: _Phase, fooled: Tensor, z: Tensor, x: Tensor) -> Tensor:
        if not self.stop_when_fooled:
            return torch.zeros_like(fooled)
        if phase.threat.eps > self.threat.eps:
            return fooled & (self.threat.size(z, x) <= self.threat.eps)
        return fooled

    def passes(self, right: bool = False) -> tuple[int, int]:
        phases = len(self._phases())
        look_at_x = phases > 1 and self.random_start and self.stop_when_fooled and not right
        return self.steps, phases + look_at_x + self.goal.forwards


def _without_wrong_from_the_start(standing: _Standing, best: Tensor) -> _Standing:
    """Hand back clean images that are misclassified already: their start, beyond the real budget, proves nothing."""
    _, fooled = standing.aim.look(standing.x, 0.0)
    best[fooled] = standing.x[fooled]
    return standing.keep(~fooled)


def _targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The targeted DLR loss, and below four classes the plain difference of the two logits.

    With three, the ratio is constant while the target comes last: its slope would be nothing but rounding errors.
    """
    if logits.shape[1] > 3:
        return targeted_dlr(logits, y, target)
    return lead(logits, y, target)


@dataclass(frozen=True)
class _TargetedAim:
    model: nn.Module
    y: Tensor
    target: Tensor

    def look(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        logits = self.model(z)
        return _targeted(logits, self.y, self.target), fooled(self.model, z, logits, self.y)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, y=self.y[chosen], target=self.target[chosen])


@dataclass(frozen=True, eq=False)
class TowardsClass:
    """Maximise the targeted DLR loss towards each sample's `target`; any wrong class counts as fooled."""

    target: Tensor

    @property
    def forwards(self) -> int:
        return 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _TargetedAim(model, y, self.target)


@dataclass(frozen=True)
class TowardsRank:
    """`TowardsClass`, with the class that stands at `rank` of the clean logits.

    The label has rank 1, whatever its logit, so 2 is the likeliest wrong class.
    """

    rank: int = 2

    @property
    def forwards(self) -> int:
        return 1  # the clean logits

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        with torch.no_grad():
            wrong = likeliest_wrong(model(x), y)
        if not 2 <= self.rank <= wrong.shape[1] + 1:
            raise UserError(f"rank must lie between 2 and the number of classes, {wrong.shape[1] + 1}, got {self.rank}")
        return _TargetedAim(model, y, wrong[:, self.rank - 2])


@dataclass(frozen=True)
class OverTargets:
    """Run APGD towards one likely wrong class after the other, on the samples that still stand (APGD-T).

    Its goal is replaced: rank 2 of the clean logits, then rank 3, ..., `targets` of them or as many as there are.
    """

    attack: APGD
    targets: int = 9

    def __post_init__(self) -> None:
        if self.targets < 1:
            raise UserError(f"targets must be at least 1, got {self.targets}")
        if not self.attack.stop_when_fooled:
            raise UserError("targets are tried until one fools the model: use an attack with stop_when_fooled=True")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        check_pixels(x)
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        found = x.detach().clone()
        with frozen(model), torch.no_grad():
            clean = model(found)
            (place,) = torch.where(~fooled(model, found, clean, y))
        for turn, target in enumerate(likeliest_wrong(clean, y).unbind(1)[: self.targets]):
            if len(place) == 0:
                break
            attack = replace(self.attack, goal=TowardsClass(target[place]))
            own = rng[place].stream("target", turn)
            found[place], standing = attack.search(model, x[place], y[place], own, right=True)
            place = place[standing]
        return found

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes(right=True)
        own = forwards - self.attack.goal.forwards  # clean logits are computed once for all targets
        return gradients * self.targets, own * self.targets + 1


def apgd_ce(
    threat: Threat, steps: int = 100, restarts: int = 1, rho: float = _USUAL, momentum: float = _USUAL
) -> Attack:
    """APGD on the cross-entropy."""
    return repeated(APGD(threat, steps=steps, rho=rho, momentum=momentum), restarts)


def apgd_dlr(
    threat: Threat, steps: int = 100, restarts: int = 1, rho: float = _USUAL, momentum: float = _USUAL
) -> Attack:
    """APGD on the difference of logits ratio."""
    return repeated(APGD(threat, OnLogits(dlr), steps, rho=rho, momentum=momentum), restarts)


def apgd_t(
    threat: Threat,
    steps: int = 100,
    targets: int = 9,
    restarts: int = 1,
    rho: float = _USUAL,
    momentum: float = _USUAL,
) -> Attack:
    """APGD on the targeted difference of logits ratio, over the likeliest wrong classes."""
    return repeated(OverTargets(APGD(threat, TowardsRank(), steps, rho=rho, momentum=momentum), targets), restarts)
