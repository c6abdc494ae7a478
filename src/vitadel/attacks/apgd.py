"""Auto-PGD: PGD with adaptive step sizes (Croce & Hein 2020, arXiv:2003.01690; L1: 2021, arXiv:2103.01208).

Steps start as long as the ball is wide and shrink, per sample, when progress stalls; the search then continues from the
best point so far. In L1 the number of pixels that a step moves adapts as well, and the ball shrinks in three phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from vitadel.attacks.gain_ratio import GAINS, GainRecorder, Outlook
from vitadel.attacks.goals import LogitAim, OnLogits, fooled, gradient
from vitadel.attacks.losses import dlr, lead, likeliest_wrong, targeted_dlr
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, keep_samples, per_sample, takes_arrays
from vitadel.attacks.threats import L1, Linf
from vitadel.attacks.wrappers import with_restarts
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Aim, Attack, Goal, Threat

_WALL = 1e-5  # a pixel this close to black or white counts as black or white
_DEFAULT = 0.75  # the paper's rho and momentum
_ROUNDING = 1e-7  # a smaller change of a pixel is a rounding error of the projection


def checkpoints(steps: int) -> tuple[int, ...]:
    """The iterations at which step sizes are reviewed: windows of 22 % of `steps`, each 3 % shorter, down to 6 %.

    Only those before the end. Computed in whole numbers, so that nothing depends on how 0.22 is rounded.
    """
    window, decrease, smallest = (max(percent * steps // 100, 1) for percent in (22, 3, 6))
    reviews, iteration = [], window
    while iteration < steps:
        reviews.append(iteration)
        window = max(window - decrease, smallest)
        iteration += window
    return tuple(reviews)


def _start(threat: Threat, x: Tensor, rng: SampleRNG) -> Tensor:
    """A random start as in the papers: on the surface of the ball, then clipped to the box."""
    if isinstance(threat, L1):
        # Noise far outside the ball: its projection changes few pixels, as good L1 steps do.
        return threat.project(x + rng.normal(*x.shape[1:]).to(x.dtype), x)
    if isinstance(threat, Linf):
        noise = rng.uniform(*x.shape[1:]) * 2 - 1
        reach = threat.eps / noise.flatten(1).abs().amax(1).clamp(min=1e-12)
        return threat.project(x + per_sample(reach, x) * noise.to(x.dtype), x)
    return threat.random(x, rng, surface=True)


@dataclass(frozen=True)
class _Active:
    """The samples not fooled yet: their goal, their clean images and their places in the batch."""

    aim: Aim
    x: Tensor
    place: Tensor

    def keep(self, chosen: Tensor) -> _Active:
        return _Active(self.aim.keep(chosen), self.x[chosen], self.place[chosen])


def _each(chosen: Tensor, like: Tensor) -> Tensor:
    """A mask of samples, in a shape that broadcasts with their images."""
    return chosen.view(-1, *[1] * (like.ndim - 1))


class _StepSizes(Protocol):
    """Adaptive step sizes; the tensors hold one entry per active sample."""

    def move(self, z: Tensor, grad: Tensor, x: Tensor, iteration: int) -> Tensor: ...

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, active: _Active, iteration: int) -> Tensor:
        """Record the newest values; returns a mask of the samples that go back to their best point.

        `best` holds the best points of the whole batch.
        """
        ...

    def keep(self, chosen: Tensor) -> _StepSizes: ...


@dataclass
class _HalvedSteps:
    """Steps with momentum, halved where few of them raised the value or the best value no longer grows (Linf, L2)."""

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

    keep = keep_samples

    @classmethod
    def start(cls, threat: Threat, steps: int, rho: float, momentum: float, z: Tensor) -> _HalvedSteps:
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
            # True at first: the test "no better value since the last review" needs a last review.
            halved=torch.ones_like(zero, dtype=torch.bool),
        )

    def move(self, z: Tensor, grad: Tensor, x: Tensor, iteration: int) -> Tensor:
        ahead = self.threat.project(z + per_sample(self.length, z) * self.threat.ascent(grad, z), x)
        share = 1.0 if iteration == 0 else self.momentum
        moved = self.threat.project(z + share * (ahead - z) + (1 - share) * (z - self.previous), x)
        self.previous = z  # the origin of the move, even if a review then resets the sample
        return moved

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, active: _Active, iteration: int) -> Tensor:
        # The first comparison is with the value at the start. (The authors' code compares with zero, a row not written
        # yet, which always counts as a rise for the cross-entropy and never for the DLR loss.)
        self.rises += value > self.last_value
        self.last_value = value
        self.window += iteration > 0
        if iteration not in self.reviews:
            return torch.zeros_like(self.halved)
        stalled = ~self.halved & (best_value <= self.last_best)
        self.halved = (self.rises <= self.rho * self.window) | stalled
        self.length = torch.where(self.halved, self.length / 2, self.length)
        self.last_best, self.rises, self.window = best_value, torch.zeros_like(self.rises), 0
        return self.halved


@dataclass
class _SparseSteps:
    """Equal steps in the pixels with the largest gradients: two thirds as many as the best point changes (L1).

    While the best point becomes sparser, steps are eps long; otherwise they shrink.
    """

    threat: L1
    every: int
    length: Tensor
    changed: Tensor
    count: Tensor
    most: int  # at least the largest count; read from the device when counts change, not in every step

    keep = keep_samples

    @classmethod
    def start(cls, threat: L1, every: int, z: Tensor, x: Tensor) -> _SparseSteps:
        length = torch.full((len(z),), float(threat.eps), dtype=torch.float64, device=z.device)
        changed, count = _changed_and_to_move(z, x)
        return cls(threat, every, length, changed, count, int(count.max()))

    def move(self, z: Tensor, grad: Tensor, x: Tensor, iteration: int) -> Tensor:
        slope, here = grad.flatten(1), z.flatten(1)
        stuck = ((here >= 1 - _WALL) & (slope > 0)) | ((here <= _WALL) & (slope < 0))
        ranked = slope.abs().masked_fill(stuck, 0).topk(self.most, dim=1).values
        step = slope.sign() * (slope.abs() >= ranked.gather(1, self.count[:, None] - 1))
        # Pixels at the box's bounds are moved, too, or the projection would reduce them, but they do not count. (In the
        # paper they do: once a step moves only such pixels, the search makes no progress.)
        each = self.length / (step.abs() * ~stuck).sum(1).clamp(min=1)
        return self.threat.project(z + per_sample(each, z) * step.view_as(z), x)

    def review(self, value: Tensor, best_value: Tensor, best: Tensor, active: _Active, iteration: int) -> Tensor:
        if iteration == 0 or iteration % self.every:
            return torch.zeros_like(self.count, dtype=torch.bool)
        changed, count = _changed_and_to_move(best[active.place], active.x)
        sparser = changed < 0.95 * self.changed
        shorter = (self.length / 1.5).clamp(min=self.threat.eps / 10)
        self.length = torch.where(sparser, torch.full_like(shorter, self.threat.eps), shorter)
        self.changed, self.count, self.most = changed, count, int(count.max())
        return sparser


def _changed_and_to_move(z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """How many pixels differ from the clean image, and how many the next steps move (a fifth of all if none differs).

    Rounded down: rounded up, two changed pixels would stay two forever, while a linear model needs the whole budget in
    one pixel.
    """
    pixels = x[0].numel()
    changed = ((z - x).abs() > _ROUNDING).flatten(1).sum(1)
    none = changed == 0
    count = torch.where(none, torch.full_like(changed, pixels // 5), changed * 2 // 3)
    return torch.where(none, torch.full_like(changed, pixels), changed), count.clamp(min=1)


@dataclass(frozen=True)
class _Phase:
    """Consecutive iterations in one ball; the first has the number `first` in the whole search."""

    threat: Threat
    first: int
    steps: int


@dataclass(frozen=True)
class APGD:
    """Maximize the goal with step sizes that adapt to each sample.

    With `stop_when_fooled` a sample stops at its first adversarial iterate. All other samples return the point with the
    largest value. `rho` is the share of steps that must raise the value for the length to stay, `momentum` the weight
    of the new direction against the last one; both apply to Linf and L2 only.
    """

    threat: Threat
    goal: Goal = field(default_factory=OnLogits)
    steps: int = 100
    random_start: bool = True
    stop_when_fooled: bool = True
    rho: float = _DEFAULT
    momentum: float = _DEFAULT

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"an attack needs at least 1 step, got {self.steps}")
        for name, value in (("rho", self.rho), ("momentum", self.momentum)):
            if not 0 <= value <= 1:
                raise UserError(f"{name} must lie between 0 and 1, got {value:g}; the paper has 0.75")
        if isinstance(self.threat, L1) and (self.rho, self.momentum) != (_DEFAULT, _DEFAULT):
            raise UserError("rho and momentum have no effect in L1, where steps adapt by another rule; leave them out")

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.search(model, x, y, rng)[0]

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, SampleInfo]:
        """With the sums over its steps of what they promised and delivered."""
        gains = GainRecorder.of(self.threat, x)
        return self.search(model, x, y, rng, gains=gains)[0], {GAINS: gains.sums}

    def search(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: SampleRNG | None = None,
        all_correct: bool = False,
        gains: GainRecorder | None = None,
        outlook: Outlook | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The attack's images, and the places of the samples that are not fooled.

        With `all_correct` the clean images are known to be classified correctly. `gains` records what steps promise
        and deliver. The search of samples that have no chance by the `outlook` ends, and their places are left out.
        """
        check_pixels(x)
        x = x.detach()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        phases = self._phases()
        with frozen(model), torch.no_grad():
            active = _Active(self.goal(model, x, y), x, torch.arange(len(x), device=x.device))
            if self.random_start:
                best = _start(phases[0].threat, x, rng.stream("start"))
                if self.stop_when_fooled and len(phases) > 1 and not all_correct:
                    active = _without_misclassified(active, best)
            else:
                best = x.clone()
            for phase in phases:
                active = self._search_phase(phase, active, best, gains, outlook)
        return best, active.place

    def _phases(self) -> tuple[_Phase, ...]:
        """One ball, or in L1 three: of 3, 2 and 1 times eps for 30 %, 30 % and 40 % of the iterations."""
        third = 3 * self.steps // 10
        if not isinstance(self.threat, L1) or third == 0:
            return (_Phase(self.threat, 0, self.steps),)
        large, larger = (replace(self.threat, eps=times * self.threat.eps) for times in (2, 3))
        return (
            _Phase(larger, 0, third),
            _Phase(large, third, third),
            _Phase(self.threat, 2 * third, self.steps - 2 * third),
        )

    def _search_phase(
        self, phase: _Phase, active: _Active, best: Tensor, gains: GainRecorder | None, outlook: Outlook | None
    ) -> _Active:
        """Search from `best` on, write better points into it, and return the samples that are not fooled."""
        if len(active.place) == 0:
            return active
        z = phase.threat.project(best[active.place], active.x)
        best[active.place] = z
        best_value = torch.full((len(z),), -torch.inf, dtype=torch.float64, device=z.device)
        best_grad, sizes = torch.zeros_like(z), self._step_sizes(phase, z, active.x)
        for iteration in range(phase.steps + 1):
            last = iteration == phase.steps  # only its value counts, so it needs no backward pass
            with torch.enable_grad():
                z.requires_grad_(not last)
                values, fooled = active.aim.evaluate(z, (phase.first + iteration) / self.steps)
                if gains is not None:
                    gains.arrive(active.place, values.detach())
                rest = self._unfinished(phase, fooled, z.detach(), active)
                if len(rest) == 0:
                    best[active.place] = z.detach()
                    return active.keep(rest)
                grad = gradient(values, z)
            z, value = z.detach(), values.detach().double()
            if len(rest) < len(z):
                kept = best[active.place[rest]]
                best[active.place] = z
                best[active.place[rest]] = kept
                active, sizes = active.keep(rest), sizes.keep(rest)
                z, value, grad = z[rest], value[rest], grad[rest]
                best_value, best_grad = best_value[rest], best_grad[rest]
            better = value > best_value
            best_here = torch.where(_each(better, z), z, best[active.place])
            best[active.place] = best_here
            if last:
                break
            best_grad = torch.where(_each(better, z), grad, best_grad)
            best_value = torch.where(better, value, best_value)
            if outlook is not None:
                rest = outlook.has_chance(active.place, value, grad, z, active.x).nonzero()[:, 0]
                if len(rest) < len(z):
                    active, sizes = active.keep(rest), sizes.keep(rest)
                    z, value, grad, best_here = z[rest], value[rest], grad[rest], best_here[rest]
                    best_value, best_grad = best_value[rest], best_grad[rest]
                if len(rest) == 0:
                    return active
            reset = sizes.review(value, best_value, best, active, iteration)
            z, grad = (torch.where(_each(reset, z), *pair) for pair in ((best_here, z), (best_grad, grad)))
            moved = sizes.move(z, grad, active.x, iteration)
            if gains is not None:
                gains.depart(active.place, torch.where(reset, best_value, value), grad, z, moved)
            z = moved
        return active

    def _step_sizes(self, phase: _Phase, z: Tensor, x: Tensor) -> _StepSizes:
        if isinstance(phase.threat, L1):
            return _SparseSteps.start(phase.threat, max(4 * self.steps // 100, 1), z, x)
        return _HalvedSteps.start(phase.threat, phase.steps, self.rho, self.momentum, z)

    def _unfinished(self, phase: _Phase, fooled: Tensor, z: Tensor, active: _Active) -> Tensor:
        """The rows of the samples that go on. Their number is the one thing of a step that the CPU waits for."""
        if not self.stop_when_fooled:
            return torch.arange(len(z), device=z.device)
        if phase.threat.eps > self.threat.eps:
            fooled = fooled & (self.threat.size(z, active.x) <= self.threat.eps)
        return (~fooled).nonzero()[:, 0]

    def passes(self, all_correct: bool = False) -> tuple[int, int]:
        phases = len(self._phases())
        on_clean = phases > 1 and self.random_start and self.stop_when_fooled and not all_correct
        return self.steps, phases + on_clean + self.goal.forwards


def _without_misclassified(active: _Active, best: Tensor) -> _Active:
    """Return misclassified clean images as they are: their start is outside the real budget."""
    _, fooled = active.aim.evaluate(active.x, 0.0)
    best[fooled] = active.x[fooled]
    return active.keep(~fooled)


def _targeted(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The targeted DLR loss, or for fewer than four classes the difference of the two logits.

    With three classes the ratio is constant while the target has the smallest logit, so its gradient would be noise.
    """
    return targeted_dlr(logits, y, target) if logits.shape[1] > 3 else lead(logits, y, target)


@dataclass(frozen=True, eq=False)
class TowardsClass:
    """Maximize the targeted DLR loss towards each sample's `target`; any wrong class counts as fooled."""

    target: Tensor

    forwards: ClassVar[int] = 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return LogitAim(model, y, _targeted, (self.target,))


@dataclass(frozen=True)
class TowardsRank:
    """`TowardsClass` with the class at `rank` of the clean logits: 1 is the label, 2 the most likely wrong class."""

    rank: int = 2

    forwards: ClassVar[int] = 1  # the clean logits

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        with torch.no_grad():
            wrong = likeliest_wrong(model(x), y)
        if not 2 <= self.rank <= wrong.shape[1] + 1:
            raise UserError(f"rank must lie between 2 and the number of classes, {wrong.shape[1] + 1}, got {self.rank}")
        return LogitAim(model, y, _targeted, (wrong[:, self.rank - 2],))


@dataclass(frozen=True)
class OverTargets:
    """APGD-T: run APGD towards one wrong class after another, each on the samples that are not fooled yet.

    The goal of `attack` is replaced: rank 2 of the clean logits, then rank 3, ..., at most `targets` classes.
    """

    attack: APGD
    targets: int = 9

    def __post_init__(self) -> None:
        if self.targets < 1:
            raise UserError(f"targets must be at least 1, got {self.targets}")
        if not self.attack.stop_when_fooled:
            raise UserError("targets are tried until one succeeds: use an attack with stop_when_fooled=True")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """With the sums over the steps towards all targets of what they promised and delivered."""
        check_pixels(x)
        found, sums = x.detach().clone(), GainRecorder.of(self.attack.threat, x).sums
        with frozen(model), torch.no_grad():
            clean = model(found)
            (place,) = torch.where(~fooled(model, found, clean, y))
        for number, target in enumerate(likeliest_wrong(clean, y).unbind(1)[: self.targets]):
            if len(place) == 0:
                break
            attack = replace(self.attack, goal=TowardsClass(target[place]))
            own = rng[place].stream("target", number)
            gains = GainRecorder.of(attack.threat, x[place]) if with_info else None
            found[place], rest = attack.search(model, x[place], y[place], own, all_correct=True, gains=gains)
            if gains is not None:
                sums[place] += gains.sums
            place = place[rest]
        return found, {GAINS: sums} if with_info else {}

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes(all_correct=True)
        own = forwards - self.attack.goal.forwards  # the clean logits are computed once for all targets
        return gradients * self.targets, own * self.targets + 1


def apgd_ce(
    threat: Threat, steps: int = 100, restarts: int = 1, rho: float = _DEFAULT, momentum: float = _DEFAULT
) -> Attack:
    """APGD on the cross-entropy."""
    return with_restarts(APGD(threat, steps=steps, rho=rho, momentum=momentum), restarts)


def apgd_dlr(
    threat: Threat, steps: int = 100, restarts: int = 1, rho: float = _DEFAULT, momentum: float = _DEFAULT
) -> Attack:
    """APGD on the difference of logits ratio."""
    return with_restarts(APGD(threat, OnLogits(dlr), steps, rho=rho, momentum=momentum), restarts)


def apgd_t(
    threat: Threat,
    steps: int = 100,
    targets: int = 9,
    restarts: int = 1,
    rho: float = _DEFAULT,
    momentum: float = _DEFAULT,
) -> Attack:
    """APGD on the targeted difference of logits ratio, over the likeliest wrong classes."""
    return with_restarts(OverTargets(APGD(threat, TowardsRank(), steps, rho=rho, momentum=momentum), targets), restarts)
