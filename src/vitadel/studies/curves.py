"""Robust accuracy against budget, steps and restarts, as AAS's figure 4 (Jain & Dutta, CVPR 2024) and the usual checks.

An attacker with more budget, steps or restarts must not do worse. Nothing is computed twice:

- against eps, every budget attacks all correctly classified images, so that the curve can rise and show a problem.
  `worst_so_far` counts images that a smaller budget breaks as broken by a larger one, too;
- against steps, runs with equal step length are the beginnings of the longest of them, which runs once and records
  when each image is broken. If the length depends on the number of steps, each number is a run of its own;
- against restarts, each one attacks what the ones before left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.goals import FromClean, OnLogits
from vitadel.attacks.parse import entry_of, make, needs_known_family, read_attack_name
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum, Steepest
from vitadel.attacks.threats import make_threat
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import needs_calibration
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import NOTE, BatchRecord, MemberResult, attack_stage, rules_of
from vitadel.evaluation.engine.target import Target
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import binomial_tail, share
from vitadel.studies.run import StudyContext, StudyRequest, run_study
from vitadel.types import Aim, Attack, Goal

STEPS = (1, 2, 5, 10, 20, 50, 100)
_TIMES_EPS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)
_TURN = "turn"
_CLEAR = 0.05


@dataclass(frozen=True)
class CurvesRequest(StudyRequest):
    """The attack and the points of the three curves; `eps` is the budget of the second and third.

    Without `budgets` they are 0 to twice eps; without `steps` 1 to 100, if the attack takes a number of steps.
    """

    attack: str = "pgd"
    budgets: tuple[float, ...] | None = None
    steps: tuple[int, ...] | None = None
    restarts: tuple[int, ...] = (1, 2, 5)
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eps <= 0:
            raise UserError(f"--eps must be above 0, because steps and restarts use it; got {self.eps:g}")
        for name, points, least in (
            ("budgets", self.points, 0),
            ("steps", self.counts, 1),
            ("restarts", self.restarts, 1),
        ):
            if any(b <= a for a, b in pairwise(points)) or any(point < least for point in points):
                raise UserError(f"--{name} must rise, from {least} or more; got {', '.join(f'{p:g}' for p in points)}")
        if not (self.points or self.counts or self.restarts):
            raise UserError("there is no curve to compute: give some --budgets, --steps or --restarts")
        if self.steps and not self.takes_steps:
            raise UserError(f"attack {self.attack!r} takes no number of steps; leave --steps out")
        for eps in filter(None, self.points):
            attack = make(self.attack, eps=eps, norm=self.norm)
            if rules_of(attack) is not None:
                raise UserError(
                    f"attack {self.attack!r} has its own threat model instead of eps; use one with a budget"
                )

    @property
    def takes_steps(self) -> bool:
        return "steps" in entry_of(read_attack_name(self.attack)).settings

    @property
    def points(self) -> tuple[float, ...]:
        if self.budgets is not None:
            return self.budgets
        most = 1.0 if self.norm == "linf" else math.inf  # the whole range of a pixel
        return tuple(times * self.eps for times in _TIMES_EPS if times * self.eps <= most)

    @property
    def counts(self) -> tuple[int, ...]:
        usual = STEPS if self.takes_steps else ()
        return usual if self.steps is None else self.steps

    @property
    def usual_steps(self) -> int | None:
        """The number of steps in the attack's name, or its default."""
        name = read_attack_name(self.attack)
        steps = name.settings.get("steps", entry_of(name).settings.get("steps"))
        return int(steps) if isinstance(steps, int) else None


def variant(text: str, steps: int) -> str:
    """The same attack with another number of steps."""
    prefixes = re.split(r"\+(?![^(]*\))", text.strip().lower())[:-1]
    name = read_attack_name(text)
    settings = {key: value for key, value in name.settings.items() if key != "steps"}
    inside = ",".join(f"{key}={str(value).lower()}" for key, value in settings.items())
    return "+".join([*prefixes, f"{name.base}-{steps}" + (f"({inside})" if inside else "")])


def beginnings(attacks: Mapping[int, Attack]) -> list[list[int]]:
    """Group numbers of steps so that one run covers each group: the longest, of which the others are the beginning.

    That holds for searches that differ only in their number of steps, and in which neither the step length nor the
    goal depends on the number of steps.
    """
    groups: list[list[int]] = []
    for steps in sorted(attacks):
        for group in groups:
            if _begins(attacks[steps], attacks[group[0]]):
                group.append(steps)
                break
        else:
            groups.append([steps])
    return groups


def _begins(first: Attack, second: Attack) -> bool:
    if not isinstance(first, PGD) or not isinstance(second, PGD):
        return False
    blind = isinstance(first.goal, (OnLogits, FromClean)) and isinstance(first.stepper, (Steepest, Momentum))
    return blind and getattr(first.stepper, "length", None) is not None and first == replace(second, steps=first.steps)


@dataclass(frozen=True)
class _TimedAim:
    aim: Aim
    place: Tensor
    turns: Tensor
    steps: int

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        values, fooled = self.aim.evaluate(z, progress)
        self.turns[self.place[fooled]] = round(progress * self.steps)
        return values, fooled

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, aim=self.aim.keep(chosen), place=self.place[chosen])


@dataclass(frozen=True, eq=False)
class _TimedGoal:
    """A goal that records in `turns` after how many steps a sample was fooled; it then leaves the search."""

    goal: Goal
    turns: Tensor
    steps: int

    @property
    def forwards(self) -> int:
        return self.goal.forwards

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return _TimedAim(self.goal(model, x, y), torch.arange(len(x), device=x.device), self.turns, self.steps)


@dataclass(frozen=True)
class Timed:
    """A search that records for each sample after how many steps it was broken, or all steps."""

    attack: PGD

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.run_with_info(model, x, y, rng)[0]

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        turns = torch.full((len(x),), self.attack.steps, device=x.device)
        timed = replace(self.attack, goal=_TimedGoal(self.attack.goal, turns, self.attack.steps))
        return timed(model, x, y, rng), {_TURN: turns}

    def passes(self) -> tuple[int, int]:
        return self.attack.passes()


@dataclass(frozen=True)
class Restart:
    """An attack with other random numbers."""

    attack: Attack
    turn: int

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        return self.attack(model, x, y, rng.stream("restart", self.turn))

    def passes(self) -> tuple[int, int]:
        return self.attack.passes()


def study_curves(
    target: Target, request: CurvesRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Measure the three curves."""

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        return _CurveRunner(study, request).curves(), {}

    return run_study("curves", target, request, processes, work, **options)


@dataclass(frozen=True)
class _CurveRunner:
    """Remembers which samples are robust, by budget and number of steps, and calibrated attacks, by budget."""

    study: StudyContext
    request: CurvesRequest
    robust: dict[tuple[float, int | None], Tensor] = field(default_factory=dict)
    calibrated: dict[float, Rescaled] = field(default_factory=dict)

    @property
    def correct(self) -> Tensor:
        return self.study.verdicts.index[self.study.verdicts.correct]

    def curves(self) -> dict[str, Any]:
        steps = self._against_steps()  # first, because the others may use its points
        found = [self._against_eps(), steps, self._against_restarts()]
        return {
            "n": len(self.study.verdicts.index),
            "attack": self.request.attack,
            "steps": self.request.usual_steps,
            "norm": self.request.norm,
            "eps_text": quantity_text(self.request.eps),
            "judged_on": "deployed model",
            "clean": share(len(self.correct), len(self.study.verdicts.index), "correct", "accuracy"),
            "curves": [curve for curve in found if curve["points"]],
        }

    def _against_eps(self) -> dict[str, Any]:
        robust, points, worst = [], [], self.correct
        for eps in self.request.points:
            held = self.correct if eps == 0 else self._robust(eps, self.request.usual_steps)
            robust.append(held)
            worst = worst[torch.isin(worst, held)]
            points.append(self._point(eps, quantity_text(eps), held) | {"worst_so_far": self._share(worst)})
        how = "every budget attacks all images that are classified correctly; 'worst so far' counts smaller ones, too"
        return _curve("eps", how, points, robust)

    def _against_steps(self) -> dict[str, Any]:
        eps, counts = self.request.eps, self.request.counts
        attacks = {steps: self._ready(eps, steps) for steps in counts}
        groups = beginnings(attacks)
        for group in groups:
            longest = attacks[group[-1]]
            if len(group) > 1 and isinstance(longest, PGD):
                records = self._records(f"eps {eps!r} up to {group[-1]} steps", Timed(longest), eps, self.correct)
                for steps in group:
                    kept = [each["index"][each["held"] | (each[f"{NOTE}{_TURN}"] > steps)] for each in records]
                    self.robust[eps, steps] = torch.from_numpy(np.concatenate(kept or [np.empty(0, np.int64)]))
        robust = [self._robust(eps, steps) for steps in counts]
        points = [self._point(steps, str(steps), held) for steps, held in zip(counts, robust, strict=True)]
        shared = [f"{', '.join(map(str, group))} steps are one run, judged on its way" for group in groups if group[1:]]
        alone = ", ".join(str(group[0]) for group in groups if not group[1:])
        how = "; ".join(shared + ([f"runs of their own: {alone} steps"] if alone else []))
        return _curve("steps", how, points, robust)

    def _against_restarts(self) -> dict[str, Any]:
        robust, points = [], []
        for turn in range(max(self.request.restarts, default=0)):
            if turn == 0:
                held = self._robust(self.request.eps, self.request.usual_steps)
            else:
                again = Restart(self._ready(self.request.eps, self.request.usual_steps), turn)
                held = _robust_samples(self._records(f"again {turn}", again, self.request.eps, held))
            if turn + 1 in self.request.restarts:
                robust.append(held)
                points.append(self._point(turn + 1, str(turn + 1), held))
        how = "the whole attack again, with other random numbers, on the images that are still correct"
        return _curve("restarts", how, points, robust)

    def _robust(self, eps: float, steps: int | None) -> Tensor:
        """The samples that are robust to one run on all that are classified correctly."""
        if (eps, steps) not in self.robust:
            records = self._records(f"eps {eps!r} steps {steps}", self._ready(eps, steps), eps, self.correct)
            self.robust[eps, steps] = _robust_samples(records)
        return self.robust[eps, steps]

    def _ready(self, eps: float, steps: int | None) -> Attack:
        name = self.request.attack if steps is None else variant(self.request.attack, steps)
        attack = make(name, eps=eps, norm=self.request.norm)
        if not needs_calibration(attack):
            return attack
        if not isinstance(attack, AAS):
            return self.study.calibrate(attack, self.request.calibration)
        # The factors of aas depend on the budget alone, so they are found once for all numbers of steps.
        if eps not in self.calibrated:
            self.calibrated[eps] = cast(Rescaled, self.study.calibrate(attack, self.request.calibration))
        return replace(self.calibrated[eps], attack=attack.attack)

    def _records(self, stage: str, attack: Attack, eps: float, exposed: Tensor) -> list[BatchRecord]:
        threat = make_threat(self.request.norm, eps)
        inside = needs_known_family(self.request.attack)
        return attack_stage(self.study.context, stage, attack, threat, exposed, inside)[-1].records

    def _share(self, held: Tensor) -> dict[str, object]:
        return share(len(held), len(self.study.verdicts.index), "held", "robust_accuracy")

    def _point(self, at: float, text: str, held: Tensor) -> dict[str, Any]:
        return {"at": at, "text": text, **self._share(held)}


def _robust_samples(records: list[BatchRecord]) -> Tensor:
    return MemberResult("", records).held


def _curve(against: str, how: str, points: list[dict[str, Any]], robust: Sequence[Tensor]) -> dict[str, Any]:
    texts = [point["text"] for point in points]
    return {"against": against, "how": how, "points": points, "rises": rises(texts, robust)}


def rises(texts: Sequence[str], robust: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Where more effort of the attacker broke fewer images, and whether that is more than chance.

    Two runs may differ by an image or two either way; `p` is that of a one-sided sign test on the images where they do.
    """
    found = []
    for (before, first), (after, second) in pairwise(zip(texts, robust, strict=True)):
        regained = int((~torch.isin(second, first)).sum())
        lost = int((~torch.isin(first, second)).sum())
        if regained > lost:
            p = binomial_tail(regained, regained + lost, 0.5)
            found.append({"from": before, "to": after, "images": regained - lost, "clear": p < _CLEAR, "p": p})
    return found
