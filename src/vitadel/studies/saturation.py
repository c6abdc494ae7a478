"""How saturated softmax attention is, block by block, before and after AAS (Jain & Dutta, CVPR 2024, figure 2).

Delta is what the largest pre-softmax score of a row lies above the second largest. The paper shows histograms of three
blocks of a normally trained model, over clean images. Here every block has them, clean and attacked, on the deployed
model and with the factors that `aas+` finds, against the thresholds of all float formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of
from vitadel.data.batches import Batch
from vitadel.errors import UserError
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.instrument.attention import scaled_attention, score_statistics
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_mean
from vitadel.studies.run import Scene, StudyRequest, run_study
from vitadel.studies.scale_factors import ThroughScaled, found_factors, plain_search
from vitadel.types import Attack

__all__ = ["CONDITIONS", "EDGES", "SaturationRequest", "counted", "quantile", "study_saturation", "thresholds"]

_PER_DECADE, _LOWEST, _HIGHEST = 32, -3, 4
EDGES: NDArray[np.float64] = 10.0 ** np.linspace(_LOWEST, _HIGHEST, _PER_DECADE * (_HIGHEST - _LOWEST) + 1)
"""Of the histograms. Below the first and above the last lies one more bin each."""

ATTENTION = ("deployed", "scaled")
IMAGES = ("clean", "attacked", "aas")
CONDITIONS = tuple(product(ATTENTION, IMAGES))
"""Whose attention is looked at, and on which images: clean, attacked, or attacked through scaled attention."""

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SaturationRequest(StudyRequest):
    """`images` of other data to find the factors on."""

    attack: str = "pgd-20"
    images: int = 1280
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images < 1:
            raise UserError(f"--images must be at least 1, got {self.images}")
        self.search()

    def search(self) -> Attack:
        return plain_search(self.attack, self.eps, self.norm)


def thresholds(kind: torch.dtype) -> dict[str, float]:
    """The gaps from which on a softmax in this format loses something: exp(-Delta) is what the second best is worth.

    Half the machine epsilon of it no longer counts beside one; then it leaves the normal range; then it is zero.
    """
    numbers = torch.finfo(kind)
    return {
        "rounds_to_one": -math.log(numbers.eps / 2),
        "leaves_normal_range": -math.log(numbers.tiny),
        "vanishes": -math.log(numbers.tiny) - math.log(numbers.eps),  # the smallest subnormal number
    }


def counted(gaps: Tensor) -> NDArray[np.uint32]:
    """How many gaps lie in each bin, from the one below `EDGES` to the one above."""
    edges = torch.from_numpy(EDGES).to(gaps.device)
    places = torch.bucketize(gaps.double().flatten(), edges, right=True)
    return torch.bincount(places, minlength=len(EDGES) + 1).cpu().numpy().astype(np.uint32)


def quantile(counts: NDArray[Any], share: float) -> float:
    """From a histogram, between the ends of a bin by logarithms; at most the last edge."""
    wanted_count, below = share * float(counts.sum()), 0.0
    for place, count in enumerate(counts.tolist()):
        if count and below + count >= wanted_count:
            part = float((wanted_count - below) / count)
            if place == 0:
                return part * float(EDGES[0])
            if place == len(EDGES):
                return float(EDGES[-1])
            low, high = float(EDGES[place - 1]), float(EDGES[place])
            return low * math.pow(high / low, part)
        below += count
    return 0.0


def study_saturation(
    target: Target,
    request: SaturationRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Histograms in `study.npz`, quantiles and shares in the results."""
    attentions_of(target.model)  # a model of no known family is told before anything is written

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        factors = found_factors(scene, request.images, request.calibration)
        pieces = _looked_at(scene, request, factors)
        counts = sum(piece["counts"].astype(np.int64) for piece in pieces)
        return _told(scene, request, factors, pieces, counts), {"edges": EDGES, "counts": np.asarray(counts)}

    return run_study("saturation", target, request, processes, work, **options)


def _precision(model: nn.Module) -> torch.dtype:
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)


def _looked_at(scene: Scene, request: SaturationRequest, factors: tuple[float, ...]) -> list[BatchRecord]:
    context, search = scene.context, request.search()
    limits = [*thresholds(_precision(context.model)).values()]

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        images = {
            "clean": batch.x,
            "attacked": search(context.model, batch.x, batch.y, rng),
            "aas": ThroughScaled(search, factors)(context.model, batch.x, batch.y, rng),
        }
        seen = [_gaps(context.model, images[name], factors if whose == "scaled" else 1.0) for whose, name in CONDITIONS]
        return {
            "counts": np.stack([np.stack([counted(gap[gap.isfinite()]) for gap in blocks]) for blocks in seen]),
            "largest": np.asarray([[_largest(gap) for gap in blocks] for blocks in seen]),
            "beyond": np.stack([np.stack([_beyond(gap, limits) for gap in blocks]) for blocks in seen]),
        }

    return run_stage(context, "gaps", scene.verdicts.index, work, lambda piece: "")


def _gaps(model: nn.Module, x: Tensor, factors: float | tuple[float, ...]) -> list[Tensor]:
    """Of every attention, one row per image: the gaps of all its heads and queries (of all its windows, for Swin)."""
    with torch.no_grad(), scaled_attention(model, factors), score_statistics(model) as gaps:
        model(x)
        return [gap.reshape(len(x), -1).float() for gap in gaps]


def _largest(gap: Tensor) -> float:
    """Over rows that have something to choose: with a single key the gap is infinite and means nothing."""
    finite = gap[gap.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _beyond(gap: Tensor, limits: Sequence[float]) -> NDArray[np.float32]:
    """(images, limits): the share of each image's rows whose gap is larger."""
    shares = [((gap > limit) & gap.isfinite()).float().mean(1) for limit in limits]
    return torch.stack(shares, 1).cpu().numpy()


def _told(
    scene: Scene, request: SaturationRequest, factors: tuple[float, ...], pieces: Sequence[BatchRecord], counts: Any
) -> dict[str, Any]:
    names = [part.name for part in attentions_of(scene.context.model)]
    precision = _precision(scene.context.model)
    largest = np.max([piece["largest"] for piece in pieces], axis=0)
    beyond = np.concatenate([piece["beyond"] for piece in pieces], axis=2)  # (conditions, blocks, images, limits)
    conditions = [
        {
            "attention": whose,
            "images": images,
            "blocks": [
                {
                    "rows": int(counts[place, block].sum()),
                    "quantiles": {f"{share:g}": quantile(counts[place, block], share) for share in _QUANTILES},
                    "largest": float(largest[place, block]),
                    "beyond": _shares(thresholds(precision), beyond[place, block]),
                }
                for block in range(len(names))
            ],
        }
        for place, (whose, images) in enumerate(CONDITIONS)
    ]
    return {
        "n": len(scene.verdicts.index),
        "attack": request.attack,
        "blocks": names,
        "factors": list(factors),
        "precision": str(precision).removeprefix("torch."),
        "thresholds": {str(kind).removeprefix("torch."): thresholds(kind) for kind in _FORMATS},
        "quantiles_by": f"histograms with {_PER_DECADE} bins per decade",
        "conditions": conditions,
    }


def _shares(limits: Mapping[str, float], beyond: NDArray[np.float32]) -> dict[str, Any]:
    """The mean over images of the share of rows beyond each limit; rows of one image are no new images."""
    told = {}
    for place, name in enumerate(limits):
        values = beyond[:, place].astype(np.float64)
        low, high = bootstrap_mean(values) if len(values) > 1 else (0.0, 1.0)
        told[name] = {"share": float(values.mean()), "ci95": [low, high], "n": len(values)}
    return told
