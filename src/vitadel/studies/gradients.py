"""How noisy the gradients of the loss are, on the deployed model and through scaled attention.

AAS (Jain & Dutta, CVPR 2024, section 6.1) says that its gradients are less noisy than those of PGD and refers to
pictures in a supplement that is not public. Here noise is measured in three ways, on the same images, each with an
interval and as a difference of pairs:

- roughness: how much neighboring pixels of the gradient differ, in units of what independent Gaussian pixels have;
- agreement: the cosine with the gradient after a random change of the image by a quarter of eps;
- zeros: the share of images whose gradient is zero, so that no attack can follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.losses import cross_entropy
from vitadel.attacks.threats import make_threat
from vitadel.backbones.anatomy import attentions_of
from vitadel.data.batches import Batch
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import mean_with_interval
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import share
from vitadel.studies.run import StudyContext, column, pixels_in_8_bits, run_study
from vitadel.studies.scale_factors import ScaledRequest, find_factors, scaled

MODELS = ("deployed", "scaled")
MEASURES = ("roughness", "agreement")
_NEARBY = 0.25  # of eps


@dataclass(frozen=True)
class GradientsRequest(ScaledRequest):
    """`images` of other data serve to find the factors; `attack` is not used."""


def roughness(gradients: Tensor) -> Tensor:
    """Mean difference of neighboring pixels over their mean size, for each image: 1 for Gaussian noise, 0 if constant.

    For independent normal numbers E|a - b| is the square root of 2 times E|a|.
    """
    g = gradients.double()
    down, across = g.diff(dim=2).abs().flatten(1).mean(1), g.diff(dim=3).abs().flatten(1).mean(1)
    size = g.abs().flatten(1).mean(1)
    return torch.where(size > 0, (down + across) / (2 * math.sqrt(2) * size), torch.nan)


def agreement(gradients: Tensor, nearby: Tensor) -> Tensor:
    """The cosine of two gradients for each image; NaN where one is zero."""
    one, other = gradients.double().flatten(1), nearby.double().flatten(1)
    cosine = F.cosine_similarity(one, other, dim=1, eps=0.0)
    return torch.where((one.norm(dim=1) > 0) & (other.norm(dim=1) > 0), cosine, torch.nan)


def input_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of each image's cross-entropy with respect to its pixels."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(cross_entropy(model(x), y).sum(), x)[0]


def study_gradients(
    target: Target, request: GradientsRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Measure every image's gradient, with and without factors."""
    attentions_of(target.model)  # refuse unknown families before anything is written

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        factors = find_factors(study, request)
        records = _measure(study, request, factors)
        arrays = {name: column(records, name) for name in ("x", *(f"gradient {model}" for model in MODELS))}
        return _summarize(study, factors, records), arrays

    return run_study("gradients", target, request, processes, work, **options)


def _measure(study: StudyContext, request: GradientsRequest, factors: tuple[float, ...]) -> list[BatchRecord]:
    models = dict(zip(MODELS, (study.model, scaled(study.model, factors)), strict=True))
    near = make_threat(request.norm, _NEARBY * request.eps)

    def work(batch: Batch, rng: SampleRNG) -> BatchRecord:
        moved = near.random(batch.x, rng.stream("nearby"))
        record: BatchRecord = {**pixels_in_8_bits(batch, study.shown, {"x": batch.x})}
        chosen = torch.isin(batch.indices, study.shown).to(batch.x.device)
        for name, model in models.items():
            here, there = (input_gradients(model, each, batch.y) for each in (batch.x, moved))
            record[f"roughness {name}"] = roughness(here).cpu().numpy()
            record[f"agreement {name}"] = agreement(here, there).cpu().numpy()
            record[f"zero {name}"] = (here.flatten(1).abs().amax(1) == 0).cpu().numpy()
            record[f"gradient {name}"] = here[chosen].abs().mean(1).float().cpu().numpy()
        return record

    return study.stage("gradients", work)


def _summarize(study: StudyContext, factors: tuple[float, ...], records: list[BatchRecord]) -> dict[str, Any]:
    n = len(study.verdicts.index)
    found: dict[str, Any] = {
        "n": n,
        "blocks": [part.name for part in attentions_of(study.model)],
        "factors": list(factors),
        "nearby": f"{_NEARBY:g} of eps",
    }
    for name in MEASURES:
        plain, softened = (column(records, f"{name} {model}").astype(np.float64) for model in MODELS)
        found[name] = {
            "deployed": _mean(plain),
            "scaled": _mean(softened),
            "difference": _mean(softened - plain),
        }
    found["zero"] = {
        model: share(int(column(records, f"zero {model}").sum()), n, "images", "share") for model in MODELS
    }
    return found


def _mean(values: NDArray[np.float64]) -> dict[str, Any] | None:
    """Over the images that have a gradient; None if none has."""
    known = values[np.isfinite(values)]
    return mean_with_interval(known) if len(known) else None
