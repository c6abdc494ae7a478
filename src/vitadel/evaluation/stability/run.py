"""The stability suite: effects of noise in a few patches on attention, features and predictions (AFAT, CVPR 2023).

Masks are random, chosen by a corruption model that is trained against this model, or by one from a file (transfer).
Patch-Fool and RVT's PGD-5 run as an audit inside. Every mask is a function of (seed, sample, mask).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitadel.attacks.patches.corruption_model import (
    CorruptionModel,
    load_corruption_model,
    normalize_like,
    save_corruption_model,
)
from vitadel.attacks.patches.learned_patches import LearnedPatches
from vitadel.attacks.patches.patch_threat import count_of_share, patch_side_of, patches_in, pixel_mask, strongest
from vitadel.attacks.patches.random_patches import check_noise, uniform_noise
from vitadel.attacks.threats import Linf
from vitadel.backbones.anatomy import (
    attentions_of,
    blocks_of,
    family_of,
    main_attentions,
    main_blocks,
    prefix_tokens_of,
)
from vitadel.data.batches import Batch
from vitadel.errors import UserError, check_known
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.attack_preparation import calibrate, check_calibration
from vitadel.evaluation.engine.expected_time import StageCosts, Trial
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, run_settings
from vitadel.evaluation.engine.stages import (
    BatchRecord,
    RunContext,
    refuse_lost_images,
    run_stage,
    running_share,
    share_wrong,
)
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.evaluation.engine.verdicts import Verdicts, parquet_bytes
from vitadel.evaluation.stability.measures import (
    SIMILARITIES,
    drift,
    histogram,
    map_similarity,
    mean_with_interval,
    over_masks,
    quartiles_of,
    steps_below_one,
)
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.hooks import block_features, frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG

SUITE = "stability"
_TRIED_STEPS = 2  # of the training of a corruption model, to time it
_SELECTOR = "corruption-model.safetensors"
_EXAMPLES = 16  # images whose cosines over masks are in the results
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_NOT_TOKENS = ("xcit", "swin", "swinv2")  # whose maps are over channels, or over windows
Corrupt = Callable[[nn.Module, Tensor, SampleRNG], Tensor]
Who = Literal["random", "learned", "transfer"]


@dataclass(frozen=True)
class StabilityRequest(RunRequest):
    """What the suite is asked to do.

    `share` of the patches, of `side` pixels (0: the model's own), get noise: with `masks` random masks for each image,
    of which the first `watched` are compared with the clean image in attention and features. `selector` is a file
    with a corruption model of another training; `learned` False leaves out the one that is trained here, in so many
    `training_steps`. `attacks` are run at 1/255, as by RVT.
    """

    share: float = 0.1
    masks: int = 100
    watched: int = 10
    similarity: str = "map"
    noise: str = "normalised"
    side: int = 0
    learned: bool = True
    training_steps: int = 60
    selector: str | None = None
    attacks: tuple[str, ...] = (RVT.attacks[-1], "patch-fool")
    batch_size: int = field(default=32, kw_only=True)
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_noise(self.share, self.masks, self.noise)
        if not 1 <= self.watched <= self.masks:
            raise UserError(f"--watched must be from 1 to the number of masks, {self.masks}; got {self.watched}")
        check_known("similarity", self.similarity, SIMILARITIES)
        self.audit()  # reports a wrong attack before anything is loaded

    def audit(self) -> AuditRequest:
        return AuditRequest(
            attacks=self.attacks,
            eps=RVT.budget,
            limit=self.limit,
            batch_size=self.batch_size,
            seed=self.seed,
            independent=True,
            skip_bad=self.skip_bad,
        )


def run_stability(
    target: Target, request: StabilityRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Run the suite, with the audit in a folder `attacks` inside the run folder."""
    target = apply_class_subset(target)
    main_blocks(target.model)  # refuses a model of an unknown family before anything is written
    if request.similarity == "centre" and family_of(target.model) in _NOT_TOKENS:
        raise UserError(f"maps of {family_of(target.model)} are not over all tokens: compare whole maps (map) or rows")
    given, content = None, None
    if request.selector is not None:
        given = _load_selector(request.selector, target, request, processes)
        content = hashlib.sha256(Path(request.selector).read_bytes()).hexdigest()[:16]
    indices, _ = target.selection(request.limit, request.seed, request.skip_bad)
    if request.learned:
        check_calibration([_learner(request)], target, indices, request.calibration, request.seed)
    settings = run_settings(
        target, request, indices, suite=SUITE, selector=content, eps=quantity_text(RVT.budget)
    )  # the corruption model by its content, wherever it lies

    def work(run: Run) -> dict[str, Any]:
        attacked = run_audit(target, request.audit(), processes, **run.inside("attacks")).results
        context = run.context(target, request)
        with frozen(context.model):
            readable = Verdicts.from_clean_stage(context, indices).index
            seen = _all_parts(context, target, request, readable, given, run.path)
        blocks = [blocks_of(context.model)[number].name for number in main_blocks(context.model)]
        run.copy_from("attacks", "samples.parquet", "examples.npz")
        run.write("stability.parquet", _table(seen))
        layers = [attentions_of(context.model)[number].name for number in main_attentions(context.model)]
        run.write("cosines.parquet", _cosines(seen, layers))
        return {**attacked, "suite": SUITE, "stability": _summary(request, seen, blocks)}

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        short = min(_TRIED_STEPS, request.training_steps)
        tried = replace(request, limit=few, training_steps=short)
        outcome = run_stability(target, tried, alone, **watched)
        costs: StageCosts = watched["costs"]
        costs.once = {name: request.training_steps / short * seconds for name, seconds in costs.once.items()}
        return outcome

    trial = Trial(len(indices), on_few)
    return execute("audit", target.model_spec, settings, processes, work, target=target, trial=trial, **options)


def _load_selector(path: str, target: Target, request: StabilityRequest, processes: Processes) -> CorruptionModel:
    """A corruption model from a file; a `UserError` if it is for a different grid of patches."""
    given = load_corruption_model(path)
    model, x = target.model.to(processes.device), torch.zeros(1, 3, *target.preprocess.shape, device=processes.device)
    side = _grid(model, x, request)[0]
    here, there = (*patches_in(x, side), side), (given.rows, given.columns, given.side)
    if here != there:
        raise UserError(
            f"{path} chooses among {there[0]} x {there[1]} patches of side {there[2]}, but here images have "
            f"{here[0]} x {here[1]} of side {here[2]}. Give one that was trained for this grid, or set --patch-side "
            f"{there[2]} for a model with the same image size."
        )
    return given


def _all_parts(
    context: RunContext,
    target: Target,
    request: StabilityRequest,
    indices: Tensor,
    given: CorruptionModel | None,
    folder: Path,
) -> dict[Who, BatchRecord]:
    """Who chose the patches -> arrays over all images of what was measured."""
    seen: dict[Who, BatchRecord] = {
        "random": _stage(context, request, indices, "random", _noise_in(request, None), request.masks)
    }
    if request.learned:
        own = _trained_here(context, target, request, indices, folder / _SELECTOR)
        seen["learned"] = _stage(context, request, indices, "learned", _noise_in(request, own), 1)
    if given is not None:
        other = given.to(context.processes.device)
        seen["transfer"] = _stage(context, request, indices, "transfer", _noise_in(request, other), 1)
    return seen


def _learner(request: StabilityRequest) -> LearnedPatches:
    """The attack whose preparation trains the corruption model."""
    return LearnedPatches(
        Linf(RVT.budget), request.share, 1, request.training_steps, noise=request.noise, side=request.side
    )


def _trained_here(
    context: RunContext, target: Target, request: StabilityRequest, indices: Tensor, path: Path
) -> CorruptionModel:
    """The corruption model for this model: trained once, on images that are not evaluated, kept in the run folder."""
    if not context.processes.on_main(path.exists):
        start = time.perf_counter()
        ready = calibrate(_learner(request), context, target, indices, request.calibration)
        if context.costs is not None:
            context.costs.outside = context.costs.once["training"] = time.perf_counter() - start
        if context.processes.is_main:
            assert isinstance(ready, LearnedPatches)
            assert ready.selector is not None
            save_corruption_model(ready.selector, path)
        context.processes.wait()
    return load_corruption_model(path).to(context.processes.device)


def _noise_in(request: StabilityRequest, selector: CorruptionModel | None) -> Corrupt:
    """Noise in the patches that the selector chooses, or in random ones; the noise is random in either case."""

    def corrupt(model: nn.Module, x: Tensor, rng: SampleRNG) -> Tensor:
        side, count, patches = _grid(model, x, request)
        if selector is None:
            chosen = rng.permutation(patches) < count
        else:
            chosen = strongest(-selector(normalize_like(model, x)), count)
        fill = uniform_noise(model, x, rng.stream("noise"), request.noise)
        return torch.where(pixel_mask(chosen, x, side), fill, x)

    return corrupt


def _grid(model: nn.Module, x: Tensor, request: StabilityRequest) -> tuple[int, int, int]:
    """Side of a patch, how many are corrupted, how many there are."""
    side = request.side or patch_side_of(model, x)
    patches = math.prod(patches_in(x, side))
    return side, count_of_share(request.share, patches), patches


def _stage(
    context: RunContext, request: StabilityRequest, indices: Tensor, who: Who, corrupt: Corrupt, masks: int
) -> BatchRecord:
    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        with torch.no_grad():
            record = _measure(context.model, batch, rng.stream(who), corrupt, masks, request)
        record["patches"] = np.asarray(_grid(context.model, batch.x, request))
        return {"index": batch.indices.cpu().numpy(), "label": batch.y.cpu().numpy(), **record}

    records = run_stage(context, f"patches {who}", indices, work, running_share("wrong", share_wrong))
    arrays = ("index", "label", "right", "cosine", "drift")
    whole = {name: np.concatenate([record[name] for record in records]) for name in arrays}
    return {**whole, "patches": records[0]["patches"]}


def _measure(
    model: nn.Module, batch: Batch, rng: SampleRNG, corrupt: Corrupt, masks: int, request: StabilityRequest
) -> BatchRecord:
    """right (images, masks), cosine (images, watched masks, layers), drift (images, watched masks, blocks)."""
    right, cosines, drifts = [], [], []
    layers, blocks, x = main_attentions(model), main_blocks(model), batch.x
    with attention_maps(model) as maps, block_features(model, blocks) as features:
        model(x)
        clean_maps, clean_features = [maps[number] for number in layers], list(features)
        prefix = prefix_tokens_of(model)
        for mask in range(min(request.watched, masks)):
            logits = model(corrupt(model, x, rng.stream("mask", mask)))
            right.append(logits.argmax(1) == batch.y)
            pairs = zip(clean_maps, (maps[number] for number in layers), strict=True)
            cosines.append(torch.stack([map_similarity(a, b, len(x), request.similarity, prefix) for a, b in pairs], 1))
            drifts.append(torch.stack([drift(a, b) for a, b in zip(clean_features, features, strict=True)], 1))
    for mask in range(len(right), masks):
        right.append(model(corrupt(model, x, rng.stream("mask", mask))).argmax(1) == batch.y)
    stacked = {"right": right, "cosine": cosines, "drift": drifts}
    return {name: torch.stack(values, 1).cpu().numpy() for name, values in stacked.items()}


def _summary(request: StabilityRequest, seen: dict[Who, BatchRecord], blocks: Sequence[str]) -> dict[str, Any]:
    side, count, patches = seen["random"]["patches"].tolist()
    edges = steps_below_one(min(float(record["cosine"].mean(2).min()) for record in seen.values()))
    return {
        "n": len(seen["random"]["index"]),
        "share": request.share,
        "patches": patches,
        "corrupted": count,
        "side": side,
        "noise": request.noise,
        "masks": request.masks,
        "watched": request.watched,
        "similarity": request.similarity,
        "blocks": list(blocks),
        **{who: _part(record, edges) for who, record in seen.items()},
    }


def _part(record: BatchRecord, edges: Sequence[float]) -> dict[str, Any]:
    each = record["cosine"].mean(2)  # over layers: one number per image and mask
    first, worst = each[:, 0], each.min(1)
    return {
        "accuracy": over_masks(record["right"]),
        "similarity": {
            **mean_with_interval(each.mean(1)),
            "first_mask": {**mean_with_interval(first), **histogram(first, edges)},
            "worst_mask": {**mean_with_interval(worst), **histogram(worst, edges)},
            "layers": record["cosine"].mean((0, 1)).tolist(),
            "images": [_over_masks(*each) for each in zip(record["index"][:_EXAMPLES], each[:_EXAMPLES], strict=True)],
        },
        "drift": {**quartiles_of(record["drift"].mean(1)), "mean": record["drift"].mean((0, 1)).tolist()},
    }


def _cosines(seen: dict[Who, BatchRecord], layers: Sequence[str]) -> bytes:
    """`cosines.parquet`: a row for each way of choosing patches, image and mask; a column for each layer."""
    parts = []
    for who, record in seen.items():
        images, masks, _ = record["cosine"].shape
        columns = {
            "patches": np.repeat(who, images * masks),
            "index": np.repeat(record["index"], masks),
            "mask": np.tile(np.arange(masks), images),
        }
        each = record["cosine"].reshape(images * masks, -1)
        parts.append(columns | {f"cosine:{name}": each[:, place] for place, name in enumerate(layers)})
    return parquet_bytes({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _over_masks(index: int, cosines: NDArray[np.floating[Any]]) -> dict[str, Any]:
    """The cosines of one image over its masks, as figures 3 and 8 of the paper show them."""
    quantiles = np.quantile(cosines, _QUANTILES).tolist()
    return {"index": int(index), "mean": float(cosines.mean()), "masks": len(cosines), "quantiles": quantiles}


def _table(seen: dict[Who, BatchRecord]) -> bytes:
    """`stability.parquet`: one row per image; for each way of choosing patches, correct predictions and similarity."""
    columns: dict[str, Any] = {name: seen["random"][name] for name in ("index", "label")}
    for who, record in seen.items():
        each = record["cosine"].mean(2)
        columns |= {f"{who}:right": record["right"].sum(1), f"{who}:cosine": each.mean(1)}
        columns |= {f"{who}:cosine_worst": each.min(1), f"{who}:drift_last": record["drift"].mean(1)[:, -1]}
    return parquet_bytes(columns)
