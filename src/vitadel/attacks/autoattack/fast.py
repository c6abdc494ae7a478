"""`autoattack-fast`: AutoAttack's worst case at a fraction of its passes, and all of AutoAttack where signs of masking
appear.

AutoAttack spends most passes on full-length runs towards nine targets, FAB and Square, which find almost nothing on
ordinary models. Here short runs with different losses, directions and starts come first, fooled samples stop at once,
and the remaining passes go to samples whose linearized boundary is nearly within reach. The parts: APGD (Croce & Hein
2020); probability margins in two phases (Ma et al. 2023, Xie et al. 2025, arXiv:2411.15210); MALT's targets (Melamed et
al. 2024); output-diversified starts (Tashiro et al. 2020); restarts where they can still help (Liu et al. 2022).
Samples that are far from every boundary after short runs with all losses and targets get no longer ones (`prospects`),
but for as many random ones as it takes to bound what is missed.

That is sound only if gradients are. FAB and Square therefore run as sentinels on a random part of the samples that are
still correct; the steps of the search, and single steps of three lengths (`sentinel_probe`), show whether
gradients keep their promises. If there are signs of masking, the members of AutoAttack run on everything that is still
correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitadel.attacks.autoattack.fast_evidence import (
    AUDIT,
    FAB_SENTINEL,
    ON_SENTINELS,
    PROBE,
    SEARCH,
    SEARCHES,
    SQUARE_MARGIN,
    SQUARE_SENTINELS,
    STAGES,
    WHOLE_SEARCH,
    FastEvidence,
)
from vitadel.attacks.autoattack.sentinel_probe import Probe
from vitadel.attacks.autoattack.standard import autoattack
from vitadel.attacks.fab import FAB
from vitadel.attacks.goals import deployed_fooled
from vitadel.attacks.losses import margin
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, merge_info, run_attack
from vitadel.attacks.settings import part_inside
from vitadel.attacks.square import Square
from vitadel.attacks.wrappers import MEMBER, Stage, StageResult, Stages, WorstOf, next_stage
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.attacks.autoattack.fast_search import FastSearch

__all__ = [
    "LEAST_SENTINELS",
    "STAGES",
    "AutoAttackFast",
    "SquareSentinel",
    "giving_up_nothing",
    "most_missed",
    "sentinel_passes",
]

LEAST_SENTINELS = 40

_REACHES = ((0.3, 1), (0.15, 2), (0.06, 4))  # (missing distance in units of eps, restarts for samples below it)
_SHARE = 0.04  # of the samples that are still correct: those that FAB attacks, and Square if they are enough
_FIRST_ROUND = 100  # queries


def most_missed(factor: float, samples: int) -> int:
    """How many samples may be missed by giving up: no more than the sampling error of a share, if the factor is 1."""
    return math.floor(factor * math.sqrt(samples))


def giving_up_nothing(attack: Attack) -> Attack:
    """The attack with every sample searched to the end, if it is `autoattack-fast` or around it."""
    found = part_inside(attack, AutoAttackFast)
    return attack if found is None else found[1](replace(found[0], least_chance=0.0))


def sentinel_passes(attack: Attack, correct: int) -> tuple[int, int]:
    """What the sentinels cost if the search leaves so many samples correct, with judging; nothing of other attacks."""
    found = part_inside(attack, AutoAttackFast)
    if found is None or correct == 0:
        return 0, 0
    stages = [(found[1](each).passes(), count) for _, each, count in found[0].sentinels(correct)]
    return sum(count * own[0] for own, count in stages), sum(count * (own[1] + 1) for own, count in stages)


@dataclass(frozen=True)
class SquareSentinel:
    """A short run of Square that reports the margin it reached, to be compared with that of the gradients."""

    threat: Threat
    queries: int

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        z = Square(self.threat, self.queries, rescale_schedule=True)(model, x, y, rng)
        with frozen(model), torch.no_grad():
            return z, {SQUARE_MARGIN: margin(model(z), y).double()}

    def passes(self) -> tuple[int, int]:
        return 0, self.queries + 2


@dataclass(frozen=True)
class AutoAttackFast:
    """The search, with its numbers of steps, the sentinels, and AutoAttack if they raise an alarm.

    `targets` x `target_steps` very short runs towards wrong classes (twice as long in L1, where APGD divides its steps
    among three radii), one of `nearest_steps` towards the class that came nearest, `best_targets` x `best_steps`
    long ones, and up to seven restarts. The sentinels are FAB with `sentinel_targets` x `sentinel_steps` steps and
    Square with at most `sentinel_queries`. Without `escalate` an alarm remains a warning.

    Samples that the long runs and restarts break with a chance below `least_chance` (0: none) are given up before them,
    but for a random `audited_share`, and as many more as bound the missed ones by `most_missed` times the square root
    of the number of samples, which is about the half width of the widest 95 % interval. If so many of these are broken
    that more are missed than can be tolerated, all are attacked to the end.

    A run towards a class ends for a sample that is more than `patience` times as far from it as the linear model at its
    point promises to come (`Outlook`). In runs that succeeded on other models it never had to exceed 13.
    """

    threat: Threat
    entropy_steps: int = 20
    margin_steps: int = 20
    targets: int = 9
    target_steps: int = 8
    nearest_steps: int = 10
    best_targets: int = 2
    best_steps: int = 50
    candidates: int = 15
    sentinel_targets: int = 3
    sentinel_steps: int = 30
    sentinel_queries: int = 1000
    escalate: bool = True
    least_chance: float = 0.001
    audited_share: float = 0.08
    most_missed: float = 1.0
    patience: float = 30.0
    reaches: tuple[tuple[float, int], ...] = field(default=_REACHES, kw_only=True)
    ensemble: Callable[[Threat], WorstOf] = field(default=autoattack, kw_only=True)

    def __post_init__(self) -> None:
        shares = ("least_chance", "audited_share", "most_missed")
        counts = {name: value for name, value in vars(self).items() if name not in (*shares, "patience")}
        small = {name: value for name, value in counts.items() if type(value) is int and value < 1}
        if small:
            name, value = next(iter(small.items()))
            raise UserError(f"{name} of autoattack-fast must be at least 1, got {value}")
        for name in shares:
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} of autoattack-fast must lie between 0 and 1, got {getattr(self, name):g}")
        if not self.patience > 0:
            raise UserError(f"patience of autoattack-fast must be above 0, got {self.patience:g}")

    @property
    def search(self) -> FastSearch:
        """The part that runs on every sample."""
        from vitadel.attacks.autoattack.fast_search import FastSearch

        return FastSearch(**{each.name: getattr(self, each.name) for each in fields(FastSearch)})

    def stages(self, rng: SampleRNG) -> Stages:
        """The search on all samples, sentinels until masking is decided, and AutoAttack if there are signs of it.

        Which samples are sentinels depends on the lots of all samples that are still correct, not on batches.
        """
        every = torch.arange(len(rng))
        results = {SEARCH: (yield Stage(SEARCH, self.search, every))}
        lots = rng.stream("sentinel lots").bits(1).cpu()[:, 0]
        while (further := self._given_up_after_all(FastEvidence(results), lots)) is not None:
            # With the same random numbers, so as if these samples had not been given up.
            name, places = further
            results[name] = yield Stage(name, replace(self.search, least_chance=0.0), places)
        correct = every[~FastEvidence(results).fooled_by_search]
        if self.threat.eps == 0 or len(correct) == 0:
            return
        drawn = correct[lots[correct].argsort()]
        for number, (name, attack, count) in enumerate(self.sentinels(len(correct)), start=-1):
            places = drawn[:count].sort().values
            places = places[torch.isin(places, correct)]
            if len(places) == 0 or FastEvidence(results).masked_by_sentinels:
                break
            variant = f"{attack.queries} queries" if isinstance(attack, SquareSentinel) else ""
            results[name] = yield Stage(name, attack, places, ("sentinel", number), variant)
            correct = correct[~torch.isin(correct, places[results[name].fooled])]
        if not self.escalate or not FastEvidence(results).signs:
            return
        for number, (name, member) in enumerate(self.ensemble(self.threat).members()):
            if len(correct):
                result = yield Stage(name, member, correct, (MEMBER, number))
                correct = correct[~result.fooled]

    def _given_up_after_all(self, evidence: FastEvidence, lots: Tensor) -> tuple[str, Tensor] | None:
        """The next stage for samples that were given up, and these: all that are left, or enough to bound the rest."""
        unseen = evidence.unseen
        if evidence.searched_whole or len(unseen) == 0 or (self.escalate and evidence.signs):
            return None  # with signs all of AutoAttack runs anyway
        if evidence.gave_up_too_many:
            return WHOLE_SEARCH, unseen
        more = evidence.more_to_audit(most_missed(self.most_missed, evidence.attacked))
        if evidence.audited_more or more == 0:
            return None
        return AUDIT, unseen[lots[unseen].argsort()[:more]].sort().values

    def sentinels(self, correct: int) -> list[tuple[str, Attack, int]]:
        """(name, attack, number of samples): probe and Square on all sentinels, FAB on a share of the `correct` ones.

        The queries of Square are as many as for that share, divided among all sentinels.
        """
        count = min(correct, max(LEAST_SENTINELS, round(_SHARE * correct)))
        queries = min(self.sentinel_queries, round(_SHARE * correct * self.sentinel_queries / count))
        first = min(_FIRST_ROUND, self.sentinel_queries)
        rounds = [first, queries - first] if queries >= 2 * first else [first]
        squares: list[tuple[str, Attack, int]] = [
            (name, SquareSentinel(self.threat, each), count)
            for name, each in zip(SQUARE_SENTINELS, rounds, strict=False)
        ]
        fab = FAB(self.threat, self.sentinel_steps, self.sentinel_targets)
        return [(PROBE, Probe(self.threat), count), *squares, (FAB_SENTINEL, fab, max(1, round(_SHARE * correct)))]

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """All stages, with the samples of this batch as the run; `fell_in` says which stage fooled each of them."""
        found, info, result = x.detach().clone(), SampleInfo(), None
        stages = self.stages(rng)
        while (stage := next_stage(stages, result)) is not None:
            place = stage.places.to(x.device)
            z, new = run_attack(stage.attack, model, x[place], y[place], stage.own(rng[place]))
            with frozen(model):
                fooled = deployed_fooled(model, z, y[place])
            searched = stage.name in SEARCHES
            found[place[fooled | searched]] = z[fooled | searched]
            merge_info(info, new, place, len(x))
            if not searched:
                number = STAGES.index("sentinel" if stage.name in ON_SENTINELS else "escalation")
                info["fell_in"][place[fooled]] = number
            result = StageResult(stage.places, fooled.cpu(), {name: values.cpu() for name, values in new.items()})
        return found, info

    def passes(self) -> tuple[int, int]:
        """With ten classes, for a sample that is never fooled, gets all restarts and is a sentinel; with escalation."""
        gradients, forwards = self.search.passes()
        fab = self.sentinel_targets * self.sentinel_steps
        probed = Probe(self.threat).passes()
        forwards += fab + 1 + self.sentinel_queries + 2 * len(SQUARE_SENTINELS) + probed[1]
        judged = len(ON_SENTINELS)  # whether a stage fooled a sample
        more = self.ensemble(self.threat).passes() if self.escalate else (0, 0)
        return gradients + fab + probed[0] + more[0], forwards + judged + more[1] + self.escalate
