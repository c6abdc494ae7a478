"""The search of `autoattack-fast`: short runs first, then more passes where they can still help.

Every decision about a sample depends on this sample only, not on the rest of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.apgd import APGD
from vitadel.attacks.autoattack.best_points import BestPoints, Progress, RecordBest, Value
from vitadel.attacks.autoattack.nearest_targets import nearest_targets
from vitadel.attacks.autoattack.prospects import FEATURES, chance_of, features_of
from vitadel.attacks.gain_ratio import GAINS, GainRecorder, Outlook
from vitadel.attacks.goals import changed, fooled, gradient, seen_through
from vitadel.attacks.losses import cross_entropy, lead, margin, probability_margin, targeted_dlr
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Scripted
from vitadel.attacks.threats import L1, dual_order
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.attention import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Threat

_DIVERSIFYING = 3  # steps of a restart along random logits
_SCALED = 2  # the restart whose gradients pass through attention scores multiplied by _FACTOR, if they are saturated
_FACTOR = 0.1
_LONGER_IN_L1 = 2  # times as many steps, because APGD divides them among three radii
_KEPT_ALIVE = 0.05  # share of the far samples that get all restarts, to measure what that rule misses


def _with_scaled_gradients(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        return model  # a compiled model does not run its own modules, so its attention cannot be scaled
    try:
        attentions_of(model)
    except UserError:
        return model
    change = partial(scaled_attention, factors=_FACTOR, backward_only=True)
    return seen_through(model, lambda inner: changed(inner, change))


@dataclass(frozen=True)
class _AttackState:
    """One batch under attack, with the best points so far."""

    threat: Threat
    model: nn.Module
    x: Tensor
    y: Tensor
    rng: SampleRNG
    best: BestPoints
    gains: Tensor

    def run_apgd(
        self, place: Tensor, steps: int, value: Value, stream: str, turn: int = 0, patience: float | None = None
    ) -> None:
        """APGD from a random start, on the samples at `place`; `patience` ends it where there is no chance."""
        self.best.start_search()
        if len(place):
            attack = APGD(self.threat, RecordBest(place, self.best, value), steps)
            x, y, rng = self.x[place], self.y[place], self.rng[place].stream(stream, turn)
            gains = GainRecorder.of(self.threat, x)
            outlook = None if patience is None else Outlook.of(self.threat, x, patience)
            attack.search(self.model, x, y, rng, gains=gains, outlook=outlook)
            self.gains[place] += gains.sums

    def run_pgd(
        self,
        place: Tensor,
        lengths: tuple[float, ...],
        value: Value,
        changes: tuple[int, ...],
        stream: str,
        turn: int = 0,
        scaled: bool = False,
    ) -> None:
        """PGD with the given step lengths from a random start; the last point is evaluated, too.

        `changes` are the steps at which `value` becomes another function. With `scaled` gradients pass through scaled
        attention, if the model is of a known family.
        """
        self.best.start_search()
        if len(place) == 0:
            return
        goal = RecordBest(place, self.best, value)
        attack = PGD(self.threat, goal, Scripted(lengths), len(lengths))
        rng = self.rng[place].stream(stream, turn)
        model = _with_scaled_gradients(self.model) if scaled else self.model
        # Gradients through scaled attention promise nothing about the model itself.
        gains = None if scaled else GainRecorder.of(self.threat, self.x[place], changes)
        end = attack.search(model, self.x[place], self.y[place], rng, gains)
        if gains is not None:
            self.gains[place] += gains.sums
        rest = ~self.best.fooled[place]
        if bool(rest.any()):
            with torch.no_grad():
                goal(self.model, self.x[place], self.y[place]).keep(rest).evaluate(end[rest], 1.0)


@dataclass(frozen=True)
class FastSearch:
    """The stages from the cross-entropy to the restarts; the fields are those of `AutoAttackFast`."""

    threat: Threat
    entropy_steps: int
    margin_steps: int
    targets: int
    target_steps: int
    nearest_steps: int
    best_targets: int
    best_steps: int
    candidates: int
    least_chance: float
    audited_share: float
    patience: float
    reaches: tuple[tuple[float, int], ...]

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """With info about each sample, which costs nothing.

        The stage that fooled it (`fell_in`, as a position in `STAGES`), its features and chance after the first
        runs, whether it was given up and, if so, audited, its distance from the boundary before the restarts
        (`missing`), its number of restarts, whether it was kept alive, the largest margin found, and the sums of a
        `GainRecorder` over all steps.
        """
        check_pixels(x)
        x = x.detach()
        with frozen(model):
            with torch.no_grad():
                logits = model(x)
                best = BestPoints.of(self.threat, x, logits, y, fooled(model, x, logits, y))
            state = _AttackState(self.threat, model, x, y, rng, best, GainRecorder.of(self.threat, x).sums)
            info = {"fell_in": torch.where(best.fooled, 0, -1), "clean_margin": best.margin.clone()}
            if self.threat.eps > 0:
                for number, stage in enumerate(self._stages(state, logits, info), start=1):
                    before = best.fooled.clone()
                    stage()
                    info["fell_in"][best.fooled & ~before] = number
        return best.point, info | {"margin": best.margin, GAINS: state.gains}

    def _stages(self, state: _AttackState, logits: Tensor, info: SampleInfo) -> list[Callable[[], None]]:
        """In the order of `STAGES`, without the clean images."""
        lots = state.rng.stream("lots").uniform(2)
        alive, audited = lots[:, 0] < _KEPT_ALIVE, lots[:, 1] < self.audited_share
        stages = _Stages(self, state, logits)

        def best_targets() -> None:
            info.update(stages.prospects())
            info["audited"] = info["given_up"] & audited
            stages.skipped = info["given_up"] & ~audited
            stages.margin(turn=1)
            stages.best_targets()

        def restarts() -> None:
            info["missing"] = stages.missing(stages.place()).where(~stages.skipped, info["missing"])
            info["restarts"] = sum(
                (more * ((info["missing"] < reach) & ~stages.skipped) for reach, more in self.reaches),
                start=torch.zeros_like(info["fell_in"]),
            )
            stages.restarts(info["restarts"])

        def kept_alive() -> None:
            info["far"] = (info["restarts"] < self.most_restarts) & ~state.best.fooled & ~stages.skipped
            info["kept_alive"] = alive & info["far"]
            stages.restarts(torch.where(info["kept_alive"], self.most_restarts, 0), info["restarts"])

        return [stages.entropy, stages.margin, stages.targets, best_targets, restarts, kept_alive]

    @property
    def most_restarts(self) -> int:
        return sum(count for _, count in self.reaches)

    @property
    def steps_per_target(self) -> int:
        return self.target_steps * (_LONGER_IN_L1 if isinstance(self.threat, L1) else 1)

    def passes(self) -> tuple[int, int]:
        """With ten classes, for a robust sample that was given up first, if that can be, and gets all restarts."""
        gradients, forwards = (each * (1 + (self.least_chance > 0)) for each in self._first_passes())
        runs = [self.margin_steps] + [self.best_steps] * self.best_targets
        runs += [_DIVERSIFYING + self.margin_steps] * self.most_restarts
        return gradients + sum(runs) + 1, forwards + len(runs)  # with a gradient at the best point before restarts

    def usual_passes(self) -> tuple[int, int]:
        """For a sample that is never fooled, on average, if a quarter of such samples get all but the restarts.

        Runs towards classes with all their steps: how early they end is up to the model.
        """
        gradients, forwards = self._first_passes()
        most = replace(self, reaches=(), least_chance=0.0).passes()
        return round(gradients + (most[0] - gradients) / 4), round(forwards + (most[1] - forwards) / 4)

    def _first_passes(self) -> tuple[int, int]:
        """Of the runs before it is decided whether the sample is given up, and of that decision."""
        runs = [self.entropy_steps, self.margin_steps, *[self.steps_per_target] * self.targets, self.nearest_steps]
        return sum(runs) + 1, 1 + len(runs)


@dataclass
class _Stages:
    """The stages for one batch; `table` holds each sample's targets, `reached` the best lead of each target's logit.

    The samples that are `skipped` are given up after the targets.
    """

    attack: FastSearch
    state: _AttackState
    logits: Tensor
    skipped: Tensor = field(init=False)
    table: Tensor = field(init=False)
    reached: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.skipped = torch.zeros_like(self.state.best.fooled)

    def place(self) -> Tensor:
        """The places of the samples that are still to be attacked."""
        return (~self.state.best.fooled & ~self.skipped).nonzero().squeeze(1)

    def entropy(self) -> None:
        def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
            return cross_entropy(logits, y)

        self.state.run_apgd(self.state.best.not_fooled(), self.attack.entropy_steps, value, "entropy")

    def margin(self, turn: int = 0) -> None:
        """The probability margin, away from the label first or, in turn 1, towards the rival."""
        value, lengths = _two_phases(self.attack.margin_steps, ("label", "rival")[turn])
        changes = (_second_phase(self.attack.margin_steps),)
        self.state.run_pgd(self.place(), lengths, value, changes, "margin", turn)

    def targets(self) -> None:
        """A few steps towards each of the nearest targets, then a short run towards the one that came nearest."""
        state, attack, place = self.state, self.attack, self.place()
        shape = len(self.logits), min(attack.targets, self.logits.shape[1] - 1)
        self.table = state.y.new_zeros(shape)
        self.reached = torch.full(shape, -torch.inf, dtype=torch.float64, device=state.x.device)
        if len(place):
            clean = (state.x[place], state.y[place], self.logits[place])
            self.table[place] = nearest_targets(state.model, *clean, state.threat, attack.candidates, shape[1])
        for column in range(shape[1]):
            self._run_towards(column, attack.steps_per_target, "target", column)
        self._run_towards(self.reached.argmax(1), attack.nearest_steps, "nearest target")

    def best_targets(self) -> None:
        """Long runs towards the classes with the best lead so far; the second one on the targeted DLR loss."""
        order = self.reached.argsort(dim=1, descending=True, stable=True)
        for turn in range(min(self.attack.best_targets, order.shape[1])):
            ratio = turn % 2 == 1 and self.logits.shape[1] > 3
            self._run_towards(order[:, turn], self.attack.best_steps, "best", turn, ratio)

    def _run_towards(self, column: int | Tensor, steps: int, stream: str, turn: int = 0, ratio: bool = False) -> None:
        """APGD towards the classes in these columns; it ends early for samples that it brings nowhere near them."""
        self.state.run_apgd(self.place(), steps, self._towards(column, ratio), stream, turn, self.attack.patience)

    def _towards(self, column: int | Tensor, ratio: bool = False) -> Value:
        if isinstance(column, int):
            target = self.table[:, column]
        else:
            target = self.table.gather(1, column[:, None]).squeeze(1)

        def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
            if ratio:
                return targeted_dlr(logits, y, target[place])
            gain = lead(logits, y, target[place])
            if isinstance(column, int):
                best = torch.maximum(self.reached[place, column], gain.detach().double())
                self.reached[place, column] = best
            return gain

        return value

    def prospects(self) -> SampleInfo:
        """What the runs so far say about each sample that is still correct: the chance of the later ones."""
        state, place = self.state, self.state.best.not_fooled()
        features = torch.full((len(state.x), len(FEATURES)), torch.nan, dtype=torch.float64, device=state.x.device)
        missing, logits = self._boundary(place)
        if len(place):
            searches = [Progress(each.half[place], each.end[place]) for each in state.best.searches]
            features[place] = features_of(missing[place], logits, state.y[place], searches, state.threat)
        chance = chance_of(features)
        # Without a gradient the features say nothing; restarts may break what is nearly broken, whatever the rivals.
        nearest = min((reach for reach, _ in self.attack.reaches), default=0.0)
        given_up = (chance < self.attack.least_chance) & missing.isfinite() & (missing >= nearest)
        given_up &= ~state.best.fooled
        return {"features": features, "chance": chance, "given_up": given_up, "missing": missing}

    def missing(self, place: Tensor) -> Tensor:
        """The distance from each sample's best point to its linearized boundary, in units of eps.

        Infinite for samples that are not at `place`, and where the gradient is zero.
        """
        return self._boundary(place)[0]

    def _boundary(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """The missing distances, as `missing` has them, and the logits at the best points of the samples at `place`."""
        state = self.state
        missing = torch.full((len(state.x),), torch.inf, dtype=torch.float64, device=state.x.device)
        if len(place) == 0:
            return missing, self.logits[place]
        with torch.enable_grad():
            z = state.best.point[place].clone().requires_grad_()
            logits = state.model(z)
            values = margin(logits, state.y[place])
            slope = gradient(values, z).flatten(1)
        steepness = torch.linalg.vector_norm(slope, ord=dual_order(state.threat), dim=1).double()
        gap = -values.detach().double()
        missing[place] = torch.where(steepness > 0, gap / (steepness * state.threat.eps), torch.inf)
        return missing, logits.detach()

    def restarts(self, wanted: Tensor, done: Tensor | None = None) -> None:
        """Run restart number k for samples with more than k `wanted` and at most k `done` restarts."""
        done = torch.zeros_like(wanted) if done is None else done
        for turn in range(int(wanted.max()) if len(wanted) else 0):
            place = ((wanted > turn) & (done <= turn) & ~self.state.best.fooled).nonzero().squeeze(1)
            value, lengths = self._diversified(turn)
            changes = (_DIVERSIFYING, _DIVERSIFYING + _second_phase(self.attack.margin_steps))
            self.state.run_pgd(place, lengths, value, changes, "restart", turn, scaled=turn == _SCALED)

    def _diversified(self, turn: int) -> tuple[Value, tuple[float, ...]]:
        """A few steps along random logits, every other time away from the label towards its rival, then on margins."""
        weights = self.state.rng.stream("weights", turn).uniform(self.logits.shape[1]).to(self.logits.dtype) * 2 - 1
        if turn % 2 == 0:
            lot = self.state.rng.stream("label weight", turn).uniform(1).to(weights.dtype)
            weights = weights.scatter(1, self.state.y[:, None], lot * 0.6 - 0.5)
            weights = weights.scatter(1, self.state.best.rival[:, None], 0.8)
        phases, lengths = _two_phases(self.attack.margin_steps, ("label", "rival")[turn % 2])
        total = _DIVERSIFYING + len(lengths)

        def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
            step = round(progress * total)
            if step < _DIVERSIFYING:
                return (weights[place] * logits).sum(1)
            return phases(logits, y, place, (step - _DIVERSIFYING) / len(lengths))

        return value, (1.0,) * _DIVERSIFYING + lengths


def _second_phase(steps: int) -> int:
    """The step at which both sides of the margin count."""
    return max(1, round(0.4 * steps))


def _two_phases(steps: int, first: str) -> tuple[Value, tuple[float, ...]]:
    """One side of the margin for two fifths of the steps, then both; steps shrink from 2 eps to 0 in each phase."""
    turn = _second_phase(steps)

    def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
        return probability_margin(logits, y, first if round(progress * steps) < turn else "margin")

    def falling(count: int) -> tuple[float, ...]:
        return tuple(1 + math.cos(math.pi * step / count) for step in range(count))

    return value, falling(turn) + falling(max(steps - turn, 0))
