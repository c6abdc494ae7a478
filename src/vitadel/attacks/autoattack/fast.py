"""`autoattack-fast`: AutoAttack's worst case at a fraction of its passes, and signs of when not to believe it.

What AutoAttack spends most on finds almost nothing on ordinary models: full-length runs towards nine targets, FAB and
Square. Here short runs that differ in loss, direction and start come first, every fooled sample leaves at once, and
the rest of the budget goes to samples whose linearised boundary is nearly within reach. FAB and Square remain as
sentinels on a random tenth. The parts: APGD (Croce & Hein 2020); probability margins in two phases (Ma et al. 2023,
Xie et al. 2025, arXiv:2411.15210); MALT's targets (Melamed et al. 2024); output-diversified starts (Tashiro et al.
2020); restarts where they can still help (Liu et al. 2022).

Whatever is decided about a sample depends on its own numbers only, never on how it compares with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.attacks.apgd import APGD
from vitadel.attacks.best_points import Memory, Value, Watched
from vitadel.attacks.fab import FAB
from vitadel.attacks.goals import fooled, gradient
from vitadel.attacks.losses import cross_entropy, lead, margin, probability_margin, targeted_dlr
from vitadel.attacks.malt import dual_order, nearest_targets
from vitadel.attacks.pgd import PGD
from vitadel.attacks.square import Square
from vitadel.attacks.steppers import Scripted
from vitadel.attacks.transfer.surrogate import changed, seen_through
from vitadel.backbones.anatomy import attentions_of
from vitadel.backbones.model_checks import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.attention import scaled_attention
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

__all__ = ["STAGES", "AutoAttackFast", "autoattack_fast"]

STAGES = (
    "clean",
    "cross-entropy",
    "probability margin",
    "targets",
    "best targets",
    "restarts",
    "kept alive",
    "sentinel",
)
"""What a sample may fall in; the note `fell_in` is a position in this list, or -1 for a sample that stands."""

_DIVERSIFYING = 3  # steps of a restart that follow random logits
_SOFTENED = 2  # the restart whose gradients see attention scores multiplied by _SOFTER, in case they are saturated
_SOFTER = 0.1
_REACHES = ((0.3, 1), (0.15, 2), (0.06, 4))  # missing distance, in units of eps, and how many restarts it deserves
_KEPT_ALIVE = 0.05  # share of the far samples that are given all restarts, to see what the rule above misses
_SENTINEL = 0.1


def _softened(model: nn.Module) -> nn.Module:
    if hasattr(model, "_orig_mod"):
        return model  # a compiled model does not run its own modules, so nothing inside can be softened
    try:
        attentions_of(model)
    except UserError:
        return model
    soften = partial(scaled_attention, factors=_SOFTER, backward_only=True)
    return seen_through(model, lambda inner: changed(inner, soften))


@dataclass(frozen=True)
class _Bout:
    """One batch under attack."""

    threat: Threat
    model: nn.Module
    x: Tensor
    y: Tensor
    rng: SampleRNG
    memory: Memory

    def climb(self, place: Tensor, steps: int, value: Value, stream: str, turn: int = 0) -> None:
        """APGD from a random start."""
        if len(place):
            attack = APGD(self.threat, Watched(place, self.memory, value), steps)
            attack.search(self.model, self.x[place], self.y[place], self.rng[place].stream(stream, turn))

    def walk(
        self, place: Tensor, lengths: tuple[float, ...], value: Value, stream: str, turn: int = 0, soften: bool = False
    ) -> None:
        """Steepest steps of given lengths from a random start, the last point looked at as well.

        With `soften` gradients pass through softened attention, where the model is of a known family.
        """
        if len(place) == 0:
            return
        goal = Watched(place, self.memory, value)
        attack = PGD(self.threat, goal, Scripted(lengths), len(lengths))
        rng = self.rng[place].stream(stream, turn)
        model = _softened(self.model) if soften else self.model
        end = attack(model, self.x[place], self.y[place], rng)
        rest = ~self.memory.fallen[place]
        if bool(rest.any()):
            with torch.no_grad():
                goal(self.model, self.x[place], self.y[place]).keep(rest).look(end[rest], 1.0)


@dataclass(frozen=True)
class AutoAttackFast:
    """The stages below with their numbers of steps; `targets` x `target_steps` short runs and `best_targets` x
    `best_steps` long ones towards classes, up to seven restarts, sentinels of `sentinel_targets` x `sentinel_steps`
    FAB and `sentinel_queries` Square steps.
    """

    threat: Threat
    entropy_steps: int = 20
    margin_steps: int = 40
    targets: int = 9
    target_steps: int = 15
    best_targets: int = 2
    best_steps: int = 50
    candidates: int = 100
    sentinel_targets: int = 3
    sentinel_steps: int = 30
    sentinel_queries: int = 1000
    reaches: tuple[tuple[float, int], ...] = field(default=_REACHES)

    def __post_init__(self) -> None:
        small = {name: value for name, value in vars(self).items() if isinstance(value, int) and value < 1}
        if small:
            name, value = next(iter(small.items()))
            raise UserError(f"{name} of autoattack-fast must be at least 1, got {value}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.explain(model, x, y, rng)[0]

    def explain(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The proposals, and notes: in which stage each sample fell, the distance `missing` before the restarts and
        how many of these it got, and whether it was kept alive or met the sentinels."""
        check_pixels(x)
        x = x.detach()
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        with frozen(model):
            with torch.no_grad():
                logits = model(x)
                memory = Memory.of(self.threat, x, logits, y, fooled(model, x, logits, y))
            bout = _Bout(self.threat, model, x, y, rng, memory)
            notes = {"fell_in": torch.where(memory.fallen, 0, -1)}
            if self.threat.eps > 0:
                for number, stage in enumerate(self._stages(bout, logits, notes), start=1):
                    before = memory.fallen.clone()
                    stage()
                    notes["fell_in"][memory.fallen & ~before] = number
        return memory.point, notes

    def _stages(self, bout: _Bout, logits: Tensor, notes: dict[str, Tensor]) -> list[Callable[[], None]]:
        """In the order of `STAGES`, after the clean look."""
        lots = bout.rng.stream("lots").uniform(2)
        alive, sentinel = lots[:, 0] < _KEPT_ALIVE, lots[:, 1] < _SENTINEL
        runs = _Runs(self, bout, logits)

        def restarts() -> None:
            notes["missing"] = runs.missing()
            notes["restarts"] = sum(
                (more * (notes["missing"] < reach) for reach, more in self.reaches),
                start=torch.zeros_like(notes["fell_in"]),
            )
            runs.restarts(notes["restarts"])

        def kept_alive() -> None:
            notes["far"] = (notes["restarts"] < self._most_restarts) & ~bout.memory.fallen
            notes["kept_alive"] = alive & notes["far"]
            runs.restarts(torch.where(notes["kept_alive"], self._most_restarts, 0), notes["restarts"])

        def sentinels() -> None:
            notes["sentinel"] = sentinel & ~bout.memory.fallen
            runs.sentinels(notes["sentinel"].nonzero().squeeze(1))

        return [runs.entropy, runs.margins, runs.targets, runs.best_targets, restarts, kept_alive, sentinels]

    @property
    def _most_restarts(self) -> int:
        return sum(count for _, count in self.reaches)

    def passes(self) -> tuple[int, int]:
        """With ten classes, for a sample that stands everything, gets all restarts and meets the sentinels."""
        runs = [self.entropy_steps, self.margin_steps, self.margin_steps]
        runs += [self.target_steps] * self.targets + [self.best_steps] * self.best_targets
        runs += [_DIVERSIFYING + self.margin_steps] * self._most_restarts
        fab = self.sentinel_targets * self.sentinel_steps
        return sum(runs) + 1 + fab, 1 + len(runs) + fab + 1 + self.sentinel_queries + 1


@dataclass
class _Runs:
    """The stages at work on one batch: `table` holds each sample's targets, `reached` how near each of them came."""

    plan: AutoAttackFast
    bout: _Bout
    logits: Tensor
    table: Tensor = field(init=False)
    reached: Tensor = field(init=False)

    def entropy(self) -> None:
        def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
            return cross_entropy(logits, y)

        self.bout.climb(self.bout.memory.standing(), self.plan.entropy_steps, value, "entropy")

    def margins(self) -> None:
        for turn, first in enumerate(("label", "rival")):
            value, lengths = _two_phases(self.plan.margin_steps, first)
            self.bout.walk(self.bout.memory.standing(), lengths, value, "margin", turn)

    def targets(self) -> None:
        """Short runs, the nearest class first."""
        bout, plan, place = self.bout, self.plan, self.bout.memory.standing()
        shape = len(self.logits), min(plan.targets, self.logits.shape[1] - 1)
        self.table = bout.y.new_zeros(shape)
        self.reached = torch.full(shape, -torch.inf, dtype=torch.float64, device=bout.x.device)
        if len(place) == 0:
            return
        clean = (bout.x[place], bout.y[place], self.logits[place])
        self.table[place] = nearest_targets(bout.model, *clean, bout.threat, plan.candidates, shape[1])
        for column in range(shape[1]):
            bout.climb(bout.memory.standing(), plan.target_steps, self._towards(column), "target", column)

    def best_targets(self) -> None:
        """Long runs towards the classes that came nearest, the second with the ratio as its loss."""
        order = self.reached.argsort(dim=1, descending=True, stable=True)
        for turn in range(min(self.plan.best_targets, order.shape[1])):
            columns = order[:, turn]
            value = self._towards(columns, ratio=turn % 2 == 1 and self.logits.shape[1] > 3)
            self.bout.climb(self.bout.memory.standing(), self.plan.best_steps, value, "best", turn)

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

    def missing(self) -> Tensor:
        """What the linear model at a sample's best point says is missing to its boundary, in units of eps.

        Infinite where there is nothing to attack any more, or no slope to go by.
        """
        bout, place = self.bout, self.bout.memory.standing()
        missing = torch.full((len(bout.x),), torch.inf, dtype=torch.float64, device=bout.x.device)
        if len(place) == 0:
            return missing
        with torch.enable_grad():
            z = bout.memory.point[place].clone().requires_grad_()
            values = margin(bout.model(z), bout.y[place])
            slope = gradient(values, z).flatten(1)
        steepness = torch.linalg.vector_norm(slope, ord=dual_order(bout.threat), dim=1).double()
        gap = -values.detach().double()
        missing[place] = torch.where(steepness > 0, gap / (steepness * bout.threat.eps), torch.inf)
        return missing

    def restarts(self, wanted: Tensor, done: Tensor | None = None) -> None:
        """Restart number k runs for whoever wants more than k and has not had it yet."""
        done = torch.zeros_like(wanted) if done is None else done
        for turn in range(int(wanted.max()) if len(wanted) else 0):
            place = ((wanted > turn) & (done <= turn) & ~self.bout.memory.fallen).nonzero().squeeze(1)
            value, lengths = self._diversified(turn)
            self.bout.walk(place, lengths, value, "restart", turn, soften=turn == _SOFTENED)

    def _diversified(self, turn: int) -> tuple[Value, tuple[float, ...]]:
        """A few steps along random logits (away from the label, towards the rival, every other time), then margins."""
        weights = self.bout.rng.stream("weights", turn).uniform(self.logits.shape[1]).to(self.logits.dtype) * 2 - 1
        if turn % 2 == 0:
            lot = self.bout.rng.stream("label weight", turn).uniform(1).to(weights.dtype)
            weights = weights.scatter(1, self.bout.y[:, None], lot * 0.6 - 0.5)
            weights = weights.scatter(1, self.bout.memory.rival[:, None], 0.8)
        phases, lengths = _two_phases(self.plan.margin_steps, ("label", "rival")[turn % 2])
        total = _DIVERSIFYING + len(lengths)

        def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
            step = round(progress * total)
            if step < _DIVERSIFYING:
                return (weights[place] * logits).sum(1)
            return phases(logits, y, place, (step - _DIVERSIFYING) / len(lengths))

        return value, (1.0,) * _DIVERSIFYING + lengths

    def sentinels(self, place: Tensor) -> None:
        """FAB and Square, of which nothing is expected: if they find something, the rest has not been enough."""
        bout, plan = self.bout, self.plan
        attacks: tuple[Attack, ...] = (
            FAB(bout.threat, plan.sentinel_steps, plan.sentinel_targets),
            Square(bout.threat, plan.sentinel_queries),
        )
        for turn, attack in enumerate(attacks):
            place = place[~bout.memory.fallen[place]]
            if len(place) == 0:
                return
            z = attack(bout.model, bout.x[place], bout.y[place], bout.rng[place].stream("sentinel", turn))
            with torch.no_grad():
                logits = bout.model(z)
            wrong = fooled(bout.model, z, logits, bout.y[place])
            bout.memory.note(place, z, logits, bout.y[place], wrong)


def _two_phases(steps: int, first: str) -> tuple[Value, tuple[float, ...]]:
    """One side of the margin alone for two fifths of the way, then both; each phase's steps fall from 2 eps to none."""
    turn = max(1, round(0.4 * steps))

    def value(logits: Tensor, y: Tensor, place: Tensor, progress: float) -> Tensor:
        return probability_margin(logits, y, first if round(progress * steps) < turn else "margin")

    def falling(count: int) -> tuple[float, ...]:
        return tuple(1 + math.cos(math.pi * step / count) for step in range(count))

    return value, falling(turn) + falling(max(steps - turn, 0))


def autoattack_fast(
    threat: Threat,
    entropy_steps: int = 20,
    margin_steps: int = 40,
    targets: int = 9,
    target_steps: int = 15,
    best_targets: int = 2,
    best_steps: int = 50,
    candidates: int = 100,
    sentinel_targets: int = 3,
    sentinel_steps: int = 30,
    sentinel_queries: int = 1000,
) -> Attack:
    return AutoAttackFast(
        threat,
        entropy_steps,
        margin_steps,
        targets,
        target_steps,
        best_targets,
        best_steps,
        candidates,
        sentinel_targets,
        sentinel_steps,
        sentinel_queries,
    )
