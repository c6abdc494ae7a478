"""AAS with only some blocks scaled: the first k, a single one, the last k (Jain & Dutta, CVPR 2024, figure 3a).

The paper seems to judge on the rescaled model, whose accuracy falls for other reasons. Here an adversarial example
counts on the deployed model and together with the plain attack, and the paper's way of counting is reported beside it.
With nothing scaled this is the plain attack run twice: what scaling must beat at the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError, check_known
from vitadel.evaluation.audit.scaled_attention import count_scaled
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord, MemberResult, attack_stage
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes
from vitadel.statistics import share
from vitadel.studies.run import StudyContext, run_study
from vitadel.studies.scale_factors import ScaledRequest, ThroughScaled, find_factors, scaled
from vitadel.types import Attack

WAYS = ("first", "single", "last")


@dataclass(frozen=True)
class ScaledBlocksRequest(ScaledRequest):
    """`ways` of growing the set of scaled blocks, in steps of `every`."""

    ways: tuple[str, ...] = WAYS
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for way in self.ways:
            check_known("way", way, WAYS, " of choosing blocks")
        if not self.ways or self.every < 1:
            raise UserError(f"--ways needs at least one way and --every at least 1, got {self.ways} and {self.every}")


def block_sets(blocks: int, way: str, every: int = 1) -> list[tuple[int, frozenset[int]]]:
    """The points of a curve: a number of blocks, or the place of a single one from 1, and which blocks."""
    if way == "single":
        return [(place + 1, frozenset({place})) for place in range(0, blocks, every)]
    counts = sorted({*range(0, blocks, every), blocks})
    numbers = range(blocks)
    return [(k, frozenset(numbers[:k] if way == "first" else numbers[blocks - k :])) for k in counts]


def factors_within(factors: Sequence[float], chosen: frozenset[int]) -> tuple[float, ...]:
    """The factors of the chosen blocks; 1 for the others."""
    return tuple(factor if place in chosen else 1.0 for place, factor in enumerate(factors))


def study_scaled_blocks(
    target: Target, request: ScaledBlocksRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Run the attack for every set of blocks."""
    attentions_of(target.model)  # refuse unknown families before anything is written

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        return _measure(study, request), {}

    return run_study("scaled-blocks", target, request, processes, work, **options)


def _measure(study: StudyContext, request: ScaledBlocksRequest) -> dict[str, Any]:
    names = [part.name for part in attentions_of(study.model)]
    factors = find_factors(study, request)
    n, correct = len(study.verdicts.index), int(study.verdicts.correct.sum())
    plain = _attack(study, "plain", request.search())
    measured: dict[frozenset[int], dict[str, Any]] = {}  # sets on several curves are measured once
    curves = []
    for way in request.ways:
        sets = block_sets(len(names), way, request.every)
        for _, chosen in sets:
            if chosen not in measured:
                measured[chosen] = _measure_set(study, request, factors_within(factors, chosen), chosen, plain.held)
        curves.append({"way": way, "points": [{"at": at, **measured[chosen]} for at, chosen in sets]})
    return {
        "n": n,
        "attack": request.attack,
        "norm": request.norm,
        "blocks": names,
        "factors": list(factors),
        "judged_on": "deployed model",
        "clean": share(correct, n, "correct", "accuracy"),
        "plain": share(len(plain.held), n, "held", "robust_accuracy"),
        "all_scaled": measured.get(frozenset(range(len(names)))),
        "none_scaled": measured.get(frozenset()),
        "curves": curves,
    }


def _attack(study: StudyContext, stage: str, attack: Attack) -> MemberResult:
    """Attack all correctly classified images; of an ensemble the last member has what all others left."""
    correct = study.verdicts.index[study.verdicts.correct]
    return attack_stage(study.context, stage, attack, study.threat, correct, needs_known_family=True)[-1]


def _measure_set(
    study: StudyContext,
    request: ScaledBlocksRequest,
    factors: tuple[float, ...],
    chosen: frozenset[int],
    plain: Tensor,
) -> dict[str, Any]:
    """One set of blocks: on the deployed model, with and without the plain attack, and as the paper counts."""
    verdicts, n = study.verdicts, len(study.verdicts.index)
    title = f"{sum(1 << place for place in chosen):x}"
    result = _attack(study, f"scaled {title}", ThroughScaled(request.search(), factors))
    softened = scaled(study.model, factors)
    style = count_scaled(study.context, title, softened, request.search(), study.threat, verdicts.index)
    del style["seconds"]  # a study's numbers are the same whenever it is run
    return {
        "scaled": sorted(chosen),
        **share(int(torch.isin(plain, result.held).sum()), n, "held", "robust_accuracy"),
        "alone": share(len(result.held), n, "held", "robust_accuracy"),
        "paper_style": style,
        "clean_scaled": share(style["clean_scaled_correct"], n, "correct", "accuracy"),
    }
