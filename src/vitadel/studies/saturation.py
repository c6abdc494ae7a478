"""Saturation of softmax attention, block by block, before and after AAS (Jain & Dutta, CVPR 2024, figure 2).

Delta is the largest pre-softmax score of a row minus the second largest. The paper shows histograms of three blocks of
a normally trained model on clean images. Here every block has them, clean and attacked, on the deployed model and with
the factors that `aas+` finds, against the thresholds of all float formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitadel.backbones.anatomy import attentions_of
from vitadel.data.batches import Batch
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import mean_with_interval
from vitadel.instrument.attention import scaled_attention, score_statistics
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.run import StudyContext, run_study
from vitadel.studies.scale_factors import ScaledRequest, ThroughScaled, find_factors

_PER_DECADE, _LOWEST, _HIGHEST = 32, -3, 4
EDGES: NDArray[np.float64] = 10.0 ** np.linspace(_LOWEST, _HIGHEST, _PER_DECADE * (_HIGHEST - _LOWEST) + 1)
"""Edges of the histograms; there is one more bin below the first and one above the last."""

ATTENTION = ("deployed", "scaled")
IMAGES = ("clean", "attacked", "aas")
CONDITIONS = tuple(product(ATTENTION, IMAGES))
"""Whose attention is measured, and on which images: clean, attacked, or attacked through scaled attention."""

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class SaturationRequest(ScaledRequest):
    """With `clean_only` only clean images and the deployed model are measured: no attack, no search for factors."""

    clean_only: bool = False

    @property
    def conditions(self) -> tuple[tuple[str, str], ...]:
        return CONDITIONS[:1] if self.clean_only else CONDITIONS


def thresholds(kind: torch.dtype) -> dict[str, float]:
    """The gaps from which a softmax in this format loses precision; the second score is worth exp(-Delta).

    First it is below half the machine epsilon beside one; then it leaves the normal range; then it is zero.
    """
    numbers = torch.finfo(kind)
    return {
        "rounds_to_one": -math.log(numbers.eps / 2),
        "leaves_normal_range": -math.log(numbers.tiny),
        "vanishes": -math.log(numbers.tiny) - math.log(numbers.eps),  # the smallest subnormal number
    }


def count_gaps(gaps: Tensor) -> NDArray[np.uint32]:
    """How many gaps lie in each bin, from the one below `EDGES` to the one above."""
    edges = torch.from_numpy(EDGES).to(gaps.device)
    places = torch.bucketize(gaps.double().flatten(), edges, right=True)
    return torch.bincount(places, minlength=len(EDGES) + 1).cpu().numpy().astype(np.uint32)


def quantile(counts: NDArray[Any], share: float) -> float:
    """A quantile from a histogram, interpolated logarithmically inside a bin; at most the last edge."""
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
    target: Target, request: SaturationRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Measure histograms for `study.npz`, quantiles and shares for the results."""
    attentions_of(target.model)  # refuse unknown families before anything is written

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        factors = (1.0,) * len(attentions_of(study.model)) if request.clean_only else find_factors(study, request)
        records = _measure(study, request, factors)
        counts = np.asarray(sum(record["counts"].astype(np.int64) for record in records))
        return _summarize(study, request, factors, records, counts), {"edges": EDGES, "counts": counts}

    return run_study("saturation", target, request, processes, work, **options)


def _precision(model: nn.Module) -> torch.dtype:
    return next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)


def _measure(study: StudyContext, request: SaturationRequest, factors: tuple[float, ...]) -> list[BatchRecord]:
    model, search = study.model, request.search()
    limits = [*thresholds(_precision(model)).values()]

    def work(batch: Batch, rng: SampleRNG) -> BatchRecord:
        images = {"clean": batch.x}
        if not request.clean_only:
            images["attacked"] = search(model, batch.x, batch.y, rng)
            images["aas"] = ThroughScaled(search, factors)(model, batch.x, batch.y, rng)
        seen = [_gaps(model, images[name], factors if whose == "scaled" else 1.0) for whose, name in request.conditions]
        return {
            "counts": np.stack([np.stack([count_gaps(gap[gap.isfinite()]) for gap in blocks]) for blocks in seen]),
            "largest": np.asarray([[_largest(gap) for gap in blocks] for blocks in seen]),
            "beyond": np.stack([np.stack([_beyond(gap, limits) for gap in blocks]) for blocks in seen]),
        }

    return study.stage("gaps", work)


def _gaps(model: nn.Module, x: Tensor, factors: float | tuple[float, ...]) -> list[Tensor]:
    """For every attention, one row per image: the gaps of all its heads and queries (of all its windows, for Swin)."""
    with torch.no_grad(), scaled_attention(model, factors), score_statistics(model) as gaps:
        model(x)
        return [gap.reshape(len(x), -1).float() for gap in gaps]


def _largest(gap: Tensor) -> float:
    """The largest finite gap: with a single key it is infinite and means nothing."""
    finite = gap[gap.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _beyond(gap: Tensor, limits: Sequence[float]) -> NDArray[np.float32]:
    """(images, limits): the share of each image's rows whose gap is larger."""
    shares = [((gap > limit) & gap.isfinite()).float().mean(1) for limit in limits]
    return torch.stack(shares, 1).cpu().numpy()


def _summarize(
    study: StudyContext,
    request: SaturationRequest,
    factors: tuple[float, ...],
    records: Sequence[BatchRecord],
    counts: NDArray[Any],
) -> dict[str, Any]:
    names = [part.name for part in attentions_of(study.model)]
    precision = _precision(study.model)
    largest = np.max([record["largest"] for record in records], axis=0)
    beyond = np.concatenate([record["beyond"] for record in records], axis=2)  # (conditions, blocks, images, limits)
    conditions = [
        {
            "attention": whose,
            "images": images,
            "blocks": [
                {
                    "rows": int(counts[place, block].sum()),
                    "quantiles": {f"{share:g}": quantile(counts[place, block], share) for share in _QUANTILES},
                    "largest": float(largest[place, block]),
                    # The mean over images, which are independent; rows of one image are not.
                    "beyond": {
                        name: mean_with_interval(beyond[place, block, :, k].astype(np.float64), "share", least=0.0)
                        for k, name in enumerate(thresholds(precision))
                    },
                }
                for block in range(len(names))
            ],
        }
        for place, (whose, images) in enumerate(request.conditions)
    ]
    return {
        "n": len(study.verdicts.index),
        "attack": None if request.clean_only else request.attack,
        "blocks": names,
        "factors": list(factors),
        "precision": str(precision).removeprefix("torch."),
        "thresholds": {str(kind).removeprefix("torch."): thresholds(kind) for kind in _FORMATS},
        "quantiles_by": f"histograms with {_PER_DECADE} bins per decade",
        "conditions": conditions,
    }
