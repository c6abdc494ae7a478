"""AAS with only some blocks scaled: the first k, a single one, the last k (Jain & Dutta, CVPR 2024, figure 3a).

The paper seems to judge on the rescaled model, whose accuracy falls for reasons of its own. Here a proposal counts on
the deployed model and together with the plain attack, and the paper's way stands beside it. With nothing scaled this is
the plain attack run twice: what scaling must beat at the same cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from vitadel.attacks.attention_scaling.aas import PAPER_STYLE
from vitadel.backbones.anatomy import attentions_of
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import NOTE, MemberResult, attack_stage, clean_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.runtime.distributed import Processes
from vitadel.statistics import share
from vitadel.studies.run import Scene, StudyRequest, run_study
from vitadel.studies.scale_factors import ThroughScaled, found_factors, plain_search, scaled
from vitadel.types import Attack

__all__ = ["WAYS", "ScaledBlocksRequest", "block_sets", "factors_within", "study_scaled_blocks"]

WAYS = ("first", "single", "last")


@dataclass(frozen=True)
class ScaledBlocksRequest(StudyRequest):
    """`ways` of growing the set of scaled blocks, in steps of `every`; `images` to find the factors on."""

    attack: str = "pgd-20"
    ways: tuple[str, ...] = WAYS
    every: int = 1
    images: int = 1280
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for way in self.ways:
            if way not in WAYS:
                raise UserError(
                    f"unknown way {way!r} of choosing blocks{nearest_names(way, WAYS) or '.'} Known: {WAYS}."
                )
        if not self.ways or self.every < 1 or self.images < 1:
            raise UserError(
                f"--ways, --every and --images need at least 1, got {self.ways}, {self.every}, {self.images}"
            )
        self.search()

    def search(self) -> Attack:
        return plain_search(self.attack, self.eps, self.norm)


def block_sets(blocks: int, way: str, every: int = 1) -> list[tuple[int, frozenset[int]]]:
    """What stands at each point of a curve: a number of blocks, or the place of a single one from 1, and which."""
    if way == "single":
        return [(place + 1, frozenset({place})) for place in range(0, blocks, every)]
    counts = sorted({*range(0, blocks, every), blocks})
    numbers = range(blocks)
    return [(k, frozenset(numbers[:k] if way == "first" else numbers[blocks - k :])) for k in counts]


def factors_within(factors: Sequence[float], chosen: frozenset[int]) -> tuple[float, ...]:
    """The factors of the chosen blocks; the others stay as they are."""
    return tuple(factor if place in chosen else 1.0 for place, factor in enumerate(factors))


def study_scaled_blocks(
    target: Target,
    request: ScaledBlocksRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Every set of blocks once, in a run folder."""
    attentions_of(target.model)  # a model of no known family is told before anything is written

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        return _measured(scene, request), {}

    return run_study("scaled-blocks", target, request, processes, work, **options)


def _measured(scene: Scene, request: ScaledBlocksRequest) -> dict[str, Any]:
    names = [part.name for part in attentions_of(scene.context.model)]
    factors = found_factors(scene, request.images, request.calibration)
    correct, n = scene.verdicts.index[scene.verdicts.correct], len(scene.verdicts.index)
    (leg,) = _legs(scene, "plain", request.search(), correct)
    seen: dict[frozenset[int], dict[str, Any]] = {}  # sets that lie on several curves are tried once
    curves = []
    for way in request.ways:
        sets = block_sets(len(names), way, request.every)
        for _, chosen in sets:
            if chosen not in seen:
                seen[chosen] = _tried(scene, request, factors_within(factors, chosen), chosen, leg.held)
        curves.append({"way": way, "points": [{"at": at, **seen[chosen]} for at, chosen in sets]})
    return {
        "n": n,
        "attack": request.attack,
        "norm": request.norm,
        "blocks": names,
        "factors": list(factors),
        "judged_on": "deployed model",
        "clean": share(len(correct), n, "correct", "accuracy"),
        "plain": share(len(leg.held), n, "held", "robust_accuracy"),
        "all_scaled": seen.get(frozenset(range(len(names)))),
        "none_scaled": seen.get(frozenset()),
        "curves": curves,
    }


def _legs(scene: Scene, stage: str, attack: Attack, exposed: Tensor) -> list[MemberResult]:
    legs = attack_stage(scene.context, stage, attack, scene.threat, exposed, needs_known_family=True)
    return legs[-1:]  # of an ensemble the last member has seen what all before it left


def _tried(
    scene: Scene, request: ScaledBlocksRequest, factors: tuple[float, ...], chosen: frozenset[int], plain: Tensor
) -> dict[str, Any]:
    """One set of blocks: on the deployed model, with and without the plain attack, and as the paper counts."""
    verdicts, n = scene.verdicts, len(scene.verdicts.index)
    title = f"{sum(1 << place for place in chosen):x}"
    (leg,) = _legs(scene, f"scaled {title}", ThroughScaled(request.search(), factors), verdicts.index[verdicts.correct])
    softened = replace(scene.context, model=scaled(scene.context.model, factors))
    clean = Verdicts.of_clean(clean_stage(softened, verdicts.index, f"clean {title}"))
    right = sum(int(piece[f"{NOTE}{PAPER_STYLE}"].sum()) for piece in leg.records)
    return {
        "scaled": sorted(chosen),
        **share(int(torch.isin(plain, leg.held).sum()), n, "held", "robust_accuracy"),
        "alone": share(len(leg.held), n, "held", "robust_accuracy"),
        "paper_style": {
            **share(right, n, "held", "robust_accuracy"),
            "remark": "the rescaled model attacked and judged instead of the deployed one, images that the deployed "
            "model gets wrong counted as wrong: not a robustness estimate",
        },
        "clean_scaled": share(int(clean.correct.sum()), n, "correct", "accuracy"),
    }
