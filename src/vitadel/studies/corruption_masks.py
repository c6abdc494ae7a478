"""Which patches a corruption model chooses, and whether it matters: AFAT's masks (CVPR 2023, figure 5 and table 3).

A heat map of positions, how far it is from uniform, and accuracy under noise in the chosen patches, beside two
controls: random patches, and the most often chosen positions in every image. If the second does as much harm as the
corruption model, that has learned positions and not images.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.attacks.patches.corruption_model import (
    CorruptionModel,
    load_corruption_model,
    normalize_like,
    save_corruption_model,
)
from vitadel.attacks.patches.learned_patches import LearnedPatches
from vitadel.attacks.patches.patch_threat import Patches, patches_in, pixel_mask, strongest
from vitadel.attacks.patches.random_patches import uniform_noise
from vitadel.attacks.threats import Linf
from vitadel.data.batches import Batch
from vitadel.errors import UserError
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import BatchRecord, running_share, share_wrong
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import mean_with_interval, over_masks
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies.run import StudyContext, StudyRequest, column, pixels_in_8_bits, run_study

_FILE = "corruption-model.safetensors"
_IN_RUNS = (_FILE, f"weights/{_FILE}")
Choose = Callable[[Tensor, SampleRNG], Tensor]


@dataclass(frozen=True)
class CorruptionMasksRequest(StudyRequest):
    """Noise in a `share` of the patches, `fills` times for each image; random patches are drawn as often.

    `selector` is a file with a corruption model, or a run folder that has one, and sets the side of the patches.
    Without it the folder of the model is searched; if it has none, one is trained against the model in
    `training_steps`, on images that are not judged (`calibration`, else the training split). eps and norm are not
    used: patches may become anything.
    """

    share: float = 0.1
    fills: int = 10
    selector: str | None = None
    training_steps: int = 60
    noise: str = "normalised"
    side: int = 0
    calibration: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.attack()  # refuse a wrong share, noise or number of steps

    def attack(self) -> LearnedPatches:
        """The attack that trains the corruption model, as patches-learned does."""
        return LearnedPatches(Linf(1.0), self.share, self.fills, self.training_steps, noise=self.noise, side=self.side)


def concentration(counts: NDArray[np.integer[Any]]) -> dict[str, float]:
    """How evenly positions are chosen: entropy in bits, its maximum, and the equivalent number of equal positions."""
    shares = counts[counts > 0] / counts.sum()
    bits = float(-(shares * np.log2(shares)).sum()) + 0.0  # no minus zero
    return {"bits": bits, "most_bits": math.log2(counts.size), "positions": 2.0**bits}


def overlap(counts: NDArray[np.integer[Any]], n: int) -> float | None:
    """The share of patches that the masks of two images have in common, as the mean over all pairs.

    A position that c images chose is common to c (c - 1) ordered pairs. None for a single image.
    """
    if n < 2:
        return None
    per_mask = counts.sum() / n
    return float((counts.astype(np.float64) * (counts - 1)).sum() / (n * (n - 1) * per_mask))


def study_corruption_masks(
    target: Target, request: CorruptionMasksRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Let the corruption model choose the patches of each image, and judge the model with noise in them."""
    given = _find_selector(target, request)
    like = torch.full((1, 3, *target.preprocess.shape), 0.5)
    attack = request.attack()
    if given is not None:
        known = load_corruption_model(given)
        known(like)  # refuses images that do not fit its grid
        attack = replace(attack, side=known.side)
    rules = attack.rules(target.model.to(processes.device), like.to(processes.device))
    assert isinstance(rules, Patches)

    def work(study: StudyContext) -> tuple[dict[str, Any], BatchRecord]:
        path = study.folder.path / _FILE if given is None else given
        if given is None:
            _train(study, request, path)
        selector = load_corruption_model(path).to(processes.device)
        return _compare_masks(study, request, rules, selector, given is None)

    content = None if given is None else hashlib.sha256(given.read_bytes()).hexdigest()[:16]
    return run_study("corruption-masks", target, request, processes, work, inputs={"selector": content}, **options)


def _find_selector(target: Target, request: CorruptionMasksRequest) -> Path | None:
    """The file of an existing corruption model."""
    named = request.selector is not None
    place = Path(os.path.expanduser(request.selector if request.selector is not None else target.model_spec))
    if named and place.is_file():
        return place
    found = next((place / name for name in _IN_RUNS if (place / name).is_file()), None) if place.is_dir() else None
    if named and found is None:
        raise UserError(
            f"{place} is neither a file nor a run folder with {_FILE}. Give one of a training by afat, or leave "
            "--selector out to train one against this model"
        )
    return found


def _train(study: StudyContext, request: CorruptionMasksRequest, path: Path) -> None:
    """Train once, in the main process, and save in the run folder."""
    processes = study.context.processes
    if processes.on_main(path.exists):
        return
    selector = getattr(study.calibrate(request.attack(), request.calibration), "selector", None)
    assert isinstance(selector, CorruptionModel)
    if processes.is_main:
        save_corruption_model(selector, path)
    processes.wait()


def _compare_masks(
    study: StudyContext, request: CorruptionMasksRequest, rules: Patches, selector: CorruptionModel, trained_here: bool
) -> tuple[dict[str, Any], BatchRecord]:
    grid = patches_in(torch.empty(1, 3, *study.context.preprocess.shape), rules.side)
    patches = math.prod(grid)

    def by_selector(x: Tensor, rng: SampleRNG) -> Tensor:
        return strongest(-selector(normalize_like(study.model, x)), rules.count)

    def at_random(x: Tensor, rng: SampleRNG) -> Tensor:
        return rng.stream("patches").permutation(patches) < rules.count

    learned = _measure(study, request, rules, "learned", by_selector)
    usual = strongest(torch.from_numpy(_counts(learned))[None], rules.count).to(study.context.processes.device)
    found = {
        "learned": learned,
        "random": _measure(study, request, rules, "random", at_random),
        "usual": _measure(study, request, rules, "usual", lambda x, rng: usual.expand(len(x), -1)),
    }
    n = len(study.verdicts.index)
    right = {way: column(records, "right") for way, records in found.items()}
    # Accuracy lost beyond random masks, image by image.
    harm = {way: right["random"].mean(1) - right[way].mean(1) for way in ("learned", "usual")}
    heat = {way: _counts(found[way]) for way in ("learned", "random")}
    measured = {
        "n": n,
        "trained_here": trained_here,
        "grid": list(grid),
        "side": rules.side,
        "patches": patches,
        "corrupted": rules.count,
        "fills": request.fills,
        "noise": request.noise,
        "clean": float(study.verdicts.correct.double().mean()),
        "accuracy": {way: over_masks(each) for way, each in right.items()},
        "harm": {way: mean_with_interval(lost, "difference", seed=study.context.seed) for way, lost in harm.items()},
        "masks": {way: {**concentration(each), "overlap": overlap(each, n)} for way, each in heat.items()},
        "overlap_by_chance": rules.count / patches,
    }
    images = {name: column(learned, name) for name in ("x", "z", "chosen")}
    return measured, {**images, **{f"heat {way}": (each / n).reshape(grid) for way, each in heat.items()}}


def _counts(records: Sequence[BatchRecord]) -> NDArray[Any]:
    total: NDArray[Any] = np.sum([record["counts"] for record in records], axis=0)
    return total


def _measure(
    study: StudyContext, request: CorruptionMasksRequest, rules: Patches, way: str, choose: Choose
) -> list[BatchRecord]:
    model, shown = study.model, study.shown

    @torch.no_grad()
    def work(batch: Batch, rng: SampleRNG) -> BatchRecord:
        counts: NDArray[Any] = np.zeros(0, np.int64)
        right, saved = [], {}
        for turn in range(request.fills):
            stream = rng.stream("fill", turn)  # the same noise for all ways of choosing
            chosen = choose(batch.x, stream)
            fill = uniform_noise(model, batch.x, stream.stream("noise"), request.noise)
            z = torch.where(pixel_mask(chosen, batch.x, rules.side), fill, batch.x)
            right.append(model(z).argmax(1) == batch.y)
            if turn == 0:  # a corruption model chooses once; it is compared with the first random mask
                counts = chosen.sum(0).cpu().numpy()
                saved = pixels_in_8_bits(batch, shown, {"x": batch.x, "z": z})
                saved["chosen"] = chosen[torch.isin(batch.indices, shown).to(chosen.device)].cpu().numpy()
        return {"right": torch.stack(right, 1).cpu().numpy(), "counts": counts, **saved}

    return study.stage(f"masks {way}", work, running_share("wrong", share_wrong))
