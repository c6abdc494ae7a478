"""Where a patch looks, clean and under attack: attention of one query, as pictures and as cosines over many images.

AFAT (CVPR 2023, figures 3 and 4) shows the map of the patch in the centre and the cosine of attention when patches are
noisy. Here the images are attacked, and two scales stand beside the cosine: random changes of the same size, and
images that have nothing to do with each other, whose attention is alike more often than one would think.
"""

from __future__ import annotations

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
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.calibration import calibrate
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import histogram, mean_with_interval, steps_below_one
from vitadel.instrument.attention_rows import (
    CENTER,
    LAST,
    AttentionRow,
    check_block,
    check_query,
    find_row,
    over_patches,
    read_rows,
)
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import share
from vitadel.studies.perturbations import SHOWN, attacked, kept_pictures
from vitadel.studies.run import Scene, StudyRequest, run_study
from vitadel.types import Attack

__all__ = ["HEADS", "AttentionRequest", "cosines", "mean_of_pairs", "study_attention", "unit_sum"]

HEADS = ("mean", "each")
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class AttentionRequest(StudyRequest):
    """`query` is the patch in the centre, the class token, or ROW,COL; `block` the last that has it, or a number.

    With `heads` each, every head is told and drawn by itself, too. The attack goes all the way.
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
            raise UserError(f"heads are told as their mean or each, got {self.heads!r}; allowed: {', '.join(HEADS)}")
        self.make()  # a wrong name is told before anything is loaded

    def make(self) -> Attack:
        return training_form(make(self.attack, eps=self.eps, norm=self.norm))


def cosines(ours: Tensor, theirs: Tensor) -> Tensor:
    """Of rows of attention, (images, heads, keys), for each image and head."""
    return F.cosine_similarity(ours.double(), theirs.double(), dim=-1)


def unit_sum(rows: Tensor) -> Tensor:
    """The sum over images of the rows' directions, (heads, keys): all that `mean_of_pairs` needs to know of them."""
    return F.normalize(rows.double(), dim=-1).sum(0)


def mean_of_pairs(total: NDArray[np.float64], n: int) -> float | None:
    """The mean cosine over all pairs of different images and all heads, from the sum of their unit rows.

    |u_1 + ... + u_n|^2 is n and all the cosines of pairs, each twice. None for a single image.
    """
    if n < 2:
        return None
    return float((((total**2).sum(-1) - n) / (n * (n - 1))).mean())


def study_attention(
    target: Target,
    request: AttentionRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Compare the query's attention on each image with that on the attacked and on a randomly changed one."""
    device = processes.device
    like = torch.full((1, 3, *target.preprocess.shape), 0.5, device=device)
    row = find_row(target.model.to(device), like, request.query, request.block)  # told before anything is written

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        attack = calibrate(request.make(), scene.context, scene.target, scene.verdicts.index, request.calibration)
        pieces = _stage(scene, attack, request, row)
        told = _told(scene, request, row, pieces) | {
            "attack": {"name": request.attack, "settings": settings_of(attack)}
        }
        kept = ("x", "z", "maps clean", "maps attacked", "shown")
        return told, {name: np.concatenate([piece[name] for piece in pieces]) for name in kept}

    return run_study("attention", target, request, processes, work, **options)


def _stage(scene: Scene, attack: Attack, request: AttentionRequest, row: AttentionRow) -> list[BatchRecord]:
    context, first = scene.context, scene.verdicts.index[:SHOWN]

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        z, verdict = attacked(context, attack, scene.threat, batch, rng)  # by fused attention
        noisy = scene.threat.random(batch.x, rng.stream("random change"), surface=True)
        clean, under, random = (read_rows(context.model, row, each) for each in (batch.x, z, noisy))
        alike = cosines(clean, under)
        chosen = torch.isin(batch.indices, first).to(clean.device)
        drawn = {
            f"maps {name}": over_patches(row, rows[chosen]) for name, rows in (("clean", clean), ("attacked", under))
        }
        if request.heads != "each":
            drawn = {name: maps.mean(1, keepdim=True) for name, maps in drawn.items()}
        return {
            "attacked": alike.cpu().numpy(),
            "random": cosines(clean, random).cpu().numpy(),
            "held": verdict.held.cpu().numpy(),
            "unit sum": unit_sum(clean).cpu().numpy(),
            "shown": alike[chosen].mean(1).cpu().numpy(),
            **{name: maps.cpu().numpy() for name, maps in drawn.items()},
            **kept_pictures(batch, first, {"x": batch.x, "z": z}),
        }

    seen = total = 0.0

    def tell(piece: BatchRecord) -> str:
        nonlocal seen, total
        seen, total = seen + piece["attacked"].size, total + float(piece["attacked"].sum())
        return f"cosine {total / max(seen, 1):.3f}"

    return run_stage(context, "attention", scene.verdicts.index, work, tell)


def _told(scene: Scene, request: AttentionRequest, row: AttentionRow, pieces: Sequence[BatchRecord]) -> dict[str, Any]:
    def column(name: str) -> NDArray[Any]:
        return np.concatenate([piece[name] for piece in pieces])

    every = {name: column(name) for name in ("attacked", "random")}
    over_heads = {name: each.mean(1) for name, each in every.items()}
    edges = steps_below_one(min(float(each.min()) for each in over_heads.values()))
    correct, held = scene.verdicts.correct.numpy(), column("held")
    groups = {"fooled": correct & ~held, "held": correct & held}
    n = len(correct)
    return {
        "n": n,
        "query": request.query,
        "attention": row.attention.name,
        "heads": row.attention.heads,
        "grid": list(row.grid),
        "fooled": share(int(groups["fooled"].sum()), int(correct.sum()), "fooled", "success"),
        "cosine": {name: spread_of(each) | histogram(each, edges) for name, each in over_heads.items()},
        "by_outcome": {
            name: mean_with_interval(over_heads["attacked"][rows]) if rows.any() else None
            for name, rows in groups.items()
        },
        "other_images": mean_of_pairs(np.sum([piece["unit sum"] for piece in pieces], axis=0), n),
        "each_head": [spread_of(each) for each in every["attacked"].T] if request.heads == "each" else None,
    }


def spread_of(values: NDArray[np.floating[Any]]) -> dict[str, Any]:
    """Mean with its interval, and quantiles over images."""
    told = dict(zip(map(str, QUANTILES), np.quantile(values, QUANTILES).tolist(), strict=True))
    return {**mean_with_interval(values), "quantiles": told}
