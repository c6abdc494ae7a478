"""The stability suite: what noise in a few patches does to a model's attention, features and answers (AFAT, CVPR 2023).

Masks are drawn at random, chosen by a corruption model that was trained against this very model, or by one from a file
(transfer). Patch-Fool and RVT's PGD-5 are run as an audit inside. Every mask is a function of (seed, sample, mask).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
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
from vitadel.backbones.anatomy import blocks_of, family_of, main_attentions, main_blocks, prefix_tokens_of
from vitadel.data.batches import Batch
from vitadel.errors import Interrupted, UserError, nearest_names
from vitadel.evaluation.audit.audit import AuditRequest, run_audit
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.calibration import calibrated
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, context_for
from vitadel.evaluation.engine.stages import RunContext, clean_stage, refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts
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
from vitadel.instrument.features import block_features
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder, write_atomically, write_json

__all__ = ["SUITE", "StabilityRequest", "run_stability"]

SUITE = "stability"
_SELECTOR = "corruption-model.safetensors"
_NOT_TOKENS = ("xcit", "swin", "swinv2")  # whose maps are over channels, or over windows
Corrupt = Callable[[nn.Module, Tensor, SampleRNG], Tensor]
Who = Literal["random", "learned", "transfer"]


@dataclass(frozen=True)
class StabilityRequest:
    """What the suite is asked to do.

    `share` of the patches, of `side` pixels (0: the model's own), get noise: with `masks` random masks for each image,
    on the first `watched` of which attention and features are compared with the clean image's. `selector` is a file
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
    limit: int | None = None
    batch_size: int = 32
    seed: int = 0
    skip_bad: bool = False
    calibration: str | None = None

    def __post_init__(self) -> None:
        check_noise(self.share, self.masks, self.noise)
        if not 1 <= self.watched <= self.masks:
            raise UserError(f"of {self.masks} masks 1 to {self.masks} can be watched, got {self.watched}")
        if self.similarity not in SIMILARITIES:
            near = nearest_names(self.similarity, SIMILARITIES) or "."
            raise UserError(f"unknown similarity {self.similarity!r}{near} Known: {', '.join(SIMILARITIES)}.")
        self.audit()  # a wrong attack is told before anything is loaded

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
    target: Target,
    request: StabilityRequest,
    processes: Processes,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> Outcome:
    """In a run folder, with the audit by attacks in a folder of its own inside."""
    target = choose_among(target)
    main_blocks(target.model)  # a model of no known family is told before anything is written
    if request.similarity == "centre" and family_of(target.model) in _NOT_TOKENS:
        raise UserError(f"maps of {family_of(target.model)} are not over all tokens: compare whole maps (map) or rows")
    given = None if request.selector is None else _fitting(request.selector, target, request, processes)
    indices, _ = target.selection(request.limit, request.seed, request.skip_bad)
    settings = _settings(target, request, indices)
    run, done = begun("audit", target.model_spec, settings, processes, out=out, resume=resume, argv=argv)
    if done is not None:
        return done
    try:
        attacked = run_audit(
            target, request.audit(), processes, out=run.path / "attacks", resume=True, shown=shown, argv=argv
        ).results
        context = context_for(target, request, processes, run, shown=shown)
        with frozen(context.model):
            readable = Verdicts.of_clean(clean_stage(context, indices)).index
            seen = _all_parts(context, target, request, readable, given, run)
    except (KeyboardInterrupt, Interrupted):  # also of the audit inside: this run is what goes on with --resume
        raise Interrupted(run.path) from None
    blocks = [blocks_of(context.model)[number].name for number in main_blocks(context.model)]
    results = {**attacked, "suite": SUITE, "stability": _told(request, seen, blocks)}
    if processes.is_main:
        for file in ("samples.parquet", "examples.npz"):
            if (inside := run.path / "attacks" / file).exists():
                write_atomically(run.path / file, inside.read_bytes())
        write_atomically(run.path / "stability.parquet", _table(seen))
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)


def _fitting(path: str, target: Target, request: StabilityRequest, processes: Processes) -> CorruptionModel:
    """A corruption model of another training, if it cuts images as it is done here."""
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


def _settings(target: Target, request: StabilityRequest, indices: Tensor) -> dict[str, Any]:
    """What a resumed run must agree with; the corruption model by its content, wherever it lies."""
    content = None if request.selector is None else Path(request.selector).read_bytes()
    return {
        "suite": SUITE,
        "model": target.model_spec,
        "model_fingerprint": target.model_fingerprint(),
        "data": target.data_spec,
        "data_fingerprint": target.data_fingerprint(indices),
        **dataclasses.asdict(request),
        "selector": None if content is None else hashlib.sha256(content).hexdigest()[:16],
        "eps": quantity_text(RVT.budget),
    }


def _all_parts(
    context: RunContext,
    target: Target,
    request: StabilityRequest,
    indices: Tensor,
    given: CorruptionModel | None,
    run: RunFolder,
) -> dict[Who, BatchRecord]:
    """Who chose the patches -> one array for each thing that was seen, over all images."""
    seen: dict[Who, BatchRecord] = {
        "random": _stage(context, request, indices, "random", _noise_in(request, None), request.masks)
    }
    if request.learned:
        own = _trained_here(context, target, request, indices, run.path / _SELECTOR)
        seen["learned"] = _stage(context, request, indices, "learned", _noise_in(request, own), 1)
    if given is not None:
        other = given.to(context.processes.device)
        seen["transfer"] = _stage(context, request, indices, "transfer", _noise_in(request, other), 1)
    return seen


def _trained_here(
    context: RunContext, target: Target, request: StabilityRequest, indices: Tensor, path: Path
) -> CorruptionModel:
    """Trained once, on images that are not judged, and kept in the run folder."""
    if not context.processes.on_main(path.exists):
        attack = LearnedPatches(
            Linf(RVT.budget), request.share, 1, request.training_steps, noise=request.noise, side=request.side
        )
        ready = calibrated(attack, context, target, indices, request.calibration)
        if context.processes.is_main:
            assert isinstance(ready, LearnedPatches)
            assert ready.selector is not None
            save_corruption_model(ready.selector, path)
        context.processes.wait()
    return load_corruption_model(path).to(context.processes.device)


# Corrupting


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


# Looking


def _stage(
    context: RunContext, request: StabilityRequest, indices: Tensor, who: Who, corrupt: Corrupt, masks: int
) -> BatchRecord:
    wrong = total = 0

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        with torch.no_grad():
            piece = _looked_at(context.model, batch, rng.stream(who), corrupt, masks, request)
        piece["patches"] = np.asarray(_grid(context.model, batch.x, request))
        return {"index": batch.indices.cpu().numpy(), "label": batch.y.cpu().numpy(), **piece}

    def tell(piece: BatchRecord) -> str:
        nonlocal wrong, total
        wrong, total = wrong + int((~piece["right"]).sum()), total + piece["right"].size
        return f"{100 * wrong / max(total, 1):.1f} % wrong"

    pieces = run_stage(context, f"patches {who}", indices, work, tell)
    arrays = ("index", "label", "right", "cosine", "drift")
    whole = {name: np.concatenate([piece[name] for piece in pieces]) for name in arrays}
    return {**whole, "patches": pieces[0]["patches"]}


def _looked_at(
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


# Telling


def _told(request: StabilityRequest, seen: dict[Who, BatchRecord], blocks: Sequence[str]) -> dict[str, Any]:
    side, count, patches = seen["random"]["patches"].tolist()
    edges = steps_below_one(min(float(piece["cosine"].mean(2).min()) for piece in seen.values()))
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
        **{who: _part(piece, edges) for who, piece in seen.items()},
    }


def _part(piece: BatchRecord, edges: Sequence[float]) -> dict[str, Any]:
    each = piece["cosine"].mean(2)  # over layers: one number per image and mask
    first, worst = each[:, 0], each.min(1)
    return {
        "accuracy": over_masks(piece["right"]),
        "similarity": {
            **mean_with_interval(each.mean(1)),
            "first_mask": {**mean_with_interval(first), **histogram(first, edges)},
            "worst_mask": {**mean_with_interval(worst), **histogram(worst, edges)},
            "layers": piece["cosine"].mean((0, 1)).tolist(),
        },
        "drift": {**quartiles_of(piece["drift"].mean(1)), "mean": piece["drift"].mean((0, 1)).tolist()},
    }


def _table(seen: dict[Who, BatchRecord]) -> bytes:
    """`stability.parquet`: one row per image, for each way of choosing patches how often it was right, and how near."""
    columns: dict[str, Any] = {name: seen["random"][name] for name in ("index", "label")}
    for who, piece in seen.items():
        each = piece["cosine"].mean(2)
        columns |= {f"{who}:right": piece["right"].sum(1), f"{who}:cosine": each.mean(1)}
        columns |= {f"{who}:cosine_worst": each.min(1), f"{who}:drift_last": piece["drift"].mean(1)[:, -1]}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
