"""Attention of one query, clean and under attack, as maps and as cosines over many images.

AFAT (CVPR 2023, figures 3 and 4) shows the map of the patch in the center and the cosine of attention when patches are
noisy. Here the images are attacked, and the cosine is reported beside two references: random changes of the same size,
and pairs of unrelated images, whose attention is often similar.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitadel.attacks.parse import make
from vitadel.attacks.settings import settings_of, training_form
from vitadel.data.batches import Batch
from vitadel.errors import UserError
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import histogram, mean_with_interval, steps_below_one
from vitadel.instrument.attention_rows import (
    ALL,
    CENTER,
    LAST,
    AttentionRow,
    check_block,
    check_query,
    find_rows,
    over_patches,
    read_several,
)
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import share
from vitadel.studies.run import StudyContext, StudyRequest, column, pixels_in_8_bits, run_study
from vitadel.types import Attack

HEADS = ("mean", "each")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class AttentionRequest(StudyRequest):
    """`query` is the patch in the center, the class token, or ROW,COL; `block` the last that has it, a number, or all.

    With `heads` each, every head is also reported and drawn by itself; with `block` all, every attention, a mean over
    its heads. The attack runs all its steps.
    """

    attack: str = "pgd-20"
    query: str = CENTER
    block: str = LAST
    heads: str = HEADS[0]
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_query(self.query)
        check_block(self.block)
        if self.heads not in HEADS:
            raise UserError(f"heads must be {' or '.join(map(repr, HEADS))}, got {self.heads!r}")
        if self.block == ALL and self.heads == "each":
            raise UserError("with --block all heads are averaged; drop --heads each, or name one block")
        self.make()  # refuse a wrong name before anything is loaded

    def make(self) -> Attack:
        return training_form(make(self.attack, eps=self.eps, norm=self.norm))


def cosines(ours: Tensor, theirs: Tensor) -> Tensor:
    """Cosine of attention rows, (images, heads, keys), for each image and head."""
    return F.cosine_similarity(ours.double(), theirs.double(), dim=-1)


def unit_sum(rows: Tensor) -> Tensor:
    """The sum over images of the rows' directions, (heads, keys), which `mean_of_pairs` needs."""
    return F.normalize(rows.double(), dim=-1).sum(0)


def mean_of_pairs(total: NDArray[np.float64], n: int) -> float | None:
    """The mean cosine over all pairs of different images and all heads, from the sum of their unit rows.

    |u_1 + ... + u_n|^2 is n plus the cosines of all pairs, each twice. None for a single image.
    """
    if n < 2:
        return None
    return float((((total**2).sum(-1) - n) / (n * (n - 1))).mean())


def study_attention(
    target: Target, request: AttentionRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Compare the query's attention on each image with that on the attacked and on a randomly changed one."""
    device = processes.device
    like = torch.full((1, 3, *target.preprocess.shape), 0.5, device=device)
    # Refuse a query that the model does not have before anything is written.
    rows = find_rows(target.model.to(device), like, request.query, request.block)

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        attack = study.calibrate(request.make(), request.calibration)
        records = _measure(study, attack, request, rows)
        described = {"name": request.attack, "settings": settings_of(attack)}
        saved = ("x", "z", "maps clean", "maps attacked", "shown")
        arrays = {name: column(records, name) for name in saved}
        return _summarize(study, request, rows, records) | {"attack": described}, arrays

    return run_study("attention", target, request, processes, work, **options)


def _measure(
    study: StudyContext, attack: Attack, request: AttentionRequest, rows: Sequence[AttentionRow]
) -> list[BatchRecord]:
    seen = total = 0.0

    def compared(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
        """(images, heads) of a single attention; (images, attentions) of several, a mean over heads."""
        each = [cosines(one, other) for one, other in zip(ours, theirs, strict=True)]
        return each[0] if len(rows) == 1 else torch.stack([one.mean(1) for one in each], 1)

    def work(batch: Batch, rng: SampleRNG) -> BatchRecord:
        z, verdict = study.attack(attack, batch, rng)  # with fused attention
        noisy = study.threat.random(batch.x, rng.stream("random change"), surface=True)
        clean, under, random = (read_several(study.model, rows, each) for each in (batch.x, z, noisy))
        similarity = compared(clean, under)
        chosen = torch.isin(batch.indices, study.shown).to(similarity.device)
        maps = {
            name: _maps(rows, [one[chosen] for one in each]) for name, each in (("clean", clean), ("attacked", under))
        }
        if request.heads != "each" and len(rows) == 1:
            maps = {name: each.mean(1, keepdim=True) for name, each in maps.items()}
        return {
            "attacked": similarity.cpu().numpy(),
            "random": compared(clean, random).cpu().numpy(),
            "held": verdict.held.cpu().numpy(),
            **{f"unit sum {place}": unit_sum(one).cpu().numpy() for place, one in enumerate(clean)},
            "shown": similarity[chosen].mean(1).cpu().numpy(),
            **{f"maps {name}": each.cpu().numpy() for name, each in maps.items()},
            **pixels_in_8_bits(batch, study.shown, {"x": batch.x, "z": z}),
        }

    def note(record: BatchRecord) -> str:
        nonlocal seen, total
        seen, total = seen + record["attacked"].size, total + float(record["attacked"].sum())
        return f"cosine {total / max(seen, 1):.3f}"

    return study.stage("attention", work, note)


def _maps(rows: Sequence[AttentionRow], seen: Sequence[Tensor]) -> Tensor:
    """Maps over patches, (images, heads, rows, columns) of one attention, (images, attentions, ...) of several.

    Later stages of a network may have fewer patches: their maps are enlarged to the grid of the largest.
    """
    if len(rows) == 1:
        return over_patches(rows[0], seen[0])
    largest = max((row.grid for row in rows), key=math.prod)
    maps = [over_patches(row, one).mean(1, keepdim=True) for row, one in zip(rows, seen, strict=True)]
    return torch.cat([F.interpolate(each, largest, mode="nearest") for each in maps], 1)


def _summarize(
    study: StudyContext, request: AttentionRequest, rows: Sequence[AttentionRow], records: Sequence[BatchRecord]
) -> dict[str, Any]:
    every = {name: column(records, name) for name in ("attacked", "random")}
    over_heads = {name: each.mean(1) for name, each in every.items()}
    edges = steps_below_one(min(float(each.min()) for each in over_heads.values()))
    correct, held = study.verdicts.correct.numpy(), column(records, "held")
    groups = {"fooled": correct & ~held, "held": correct & held}
    n, row = len(correct), rows[-1]
    sums = [np.sum([record[f"unit sum {place}"] for record in records], axis=0) for place in range(len(rows))]
    unrelated = [mean_of_pairs(each, n) for each in sums]
    return {
        "n": n,
        "query": request.query,
        "attention": row.attention.name if len(rows) == 1 else f"{len(rows)} attentions",
        "heads": row.attention.heads,
        "grid": list(max((each.grid for each in rows), key=math.prod)),
        "fooled": share(int(groups["fooled"].sum()), int(correct.sum()), "fooled", "success"),
        "cosine": {name: _spread(each) | histogram(each, edges) for name, each in over_heads.items()},
        "by_outcome": {
            name: mean_with_interval(over_heads["attacked"][these]) if these.any() else None
            for name, these in groups.items()
        },
        "other_images": None if None in unrelated else float(np.mean([each for each in unrelated if each is not None])),
        "each_head": [_spread(each) for each in every["attacked"].T] if request.heads == "each" else None,
        "each_block": None
        if len(rows) == 1
        else [
            {"attention": one.attention.name, **_spread(each)}
            for one, each in zip(rows, every["attacked"].T, strict=True)
        ],
    }


def _spread(values: NDArray[np.floating[Any]]) -> dict[str, Any]:
    """Mean with its interval, and quantiles over images."""
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(values, QUANTILES).tolist(), strict=True))
    return {**mean_with_interval(values), "quantiles": quantiles}
