"""Which patches does a corruption model choose, and does it matter? AFAT's masks (CVPR 2023, figure 5 and table 3).

A heat map of positions, how far it is from uniform, and accuracy under noise in the chosen patches. Beside them two
controls: random patches, and the positions that are chosen most often, in every image. Where the second does as much
harm as the corruption model, that has learnt places and not pictures.
"""

from __future__ import annotations

import hashlib
import math
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
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.calibration import calibrate
from vitadel.evaluation.engine.run import Outcome, RunOptions
from vitadel.evaluation.engine.stages import refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.stability.measures import over_masks
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_mean
from vitadel.studies.perturbations import SHOWN, kept_pictures
from vitadel.studies.run import Scene, StudyRequest, run_study

__all__ = ["CorruptionMasksRequest", "concentration", "overlap", "study_corruption_masks"]

_FILE = "corruption-model.safetensors"
_IN_RUNS = (_FILE, f"weights/{_FILE}")
Choose = Callable[[Tensor, SampleRNG], Tensor]


@dataclass(frozen=True)
class CorruptionMasksRequest(StudyRequest):
    """Noise in a `share` of the patches, `fills` times for each image; with random patches also so many masks.

    `selector` is a file with a corruption model, or a run folder that has one, and brings the side of its patches
    along. Without it the folder of the model is looked into, and if there is none, one is trained against the model in
    `training_steps`, on images that are not judged (`calibration`, else the training split). eps and norm play no part:
    patches may become anything.
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
        self.attack()  # refuses a share, noise or number of steps that cannot be

    def attack(self) -> LearnedPatches:
        """What trains the corruption model, as patches-learned does."""
        return LearnedPatches(Linf(1.0), self.share, self.fills, self.training_steps, noise=self.noise, side=self.side)


def concentration(counts: NDArray[np.integer[Any]]) -> dict[str, float]:
    """How evenly positions are chosen: entropy in bits, the most it can be, and as how many equal positions it is."""
    shares = counts[counts > 0] / counts.sum()
    bits = float(-(shares * np.log2(shares)).sum()) + 0.0  # no minus zero
    return {"bits": bits, "most_bits": math.log2(counts.size), "positions": 2.0**bits}


def overlap(counts: NDArray[np.integer[Any]], n: int) -> float | None:
    """The share of patches that the masks of two different images have in common, a mean over all pairs.

    A position that c images chose is common to c (c - 1) ordered pairs. None for a single image.
    """
    if n < 2:
        return None
    per_mask = counts.sum() / n
    return float((counts.astype(np.float64) * (counts - 1)).sum() / (n * (n - 1) * per_mask))


def study_corruption_masks(
    target: Target,
    request: CorruptionMasksRequest,
    processes: Processes,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Ask the corruption model for the patches of each image, and judge the model with noise in them."""
    given = _given(target, request)
    like = torch.full((1, 3, *target.preprocess.shape), 0.5)
    attack = request.attack()
    if given is not None:
        known = load_corruption_model(given)
        known(like)  # refuses images that are not cut into its grid
        attack = replace(attack, side=known.side)
    rules = attack.rules(target.model.to(processes.device), like.to(processes.device))
    assert isinstance(rules, Patches)

    def work(scene: Scene) -> tuple[dict[str, Any], BatchRecord]:
        path = scene.folder.path / _FILE if given is None else given
        if given is None:
            _train(scene, request, path)
        selector = load_corruption_model(path).to(processes.device)
        return _studied(scene, request, rules, selector, given is None)

    content = None if given is None else hashlib.sha256(given.read_bytes()).hexdigest()[:16]
    inputs = {"selector": content}
    return run_study(
        "corruption-masks",
        target,
        request,
        processes,
        work,
        inputs=inputs,
        **options,
    )


def _given(target: Target, request: CorruptionMasksRequest) -> Path | None:
    """The file of a corruption model that is there already."""
    named = request.selector is not None
    place = Path(request.selector if request.selector is not None else target.model_spec).expanduser()
    if named and place.is_file():
        return place
    found = next((place / name for name in _IN_RUNS if (place / name).is_file()), None) if place.is_dir() else None
    if named and found is None:
        raise UserError(
            f"{place} is no file and no run folder with {_FILE}; name one of a run that trained by afat, or leave "
            "--selector out to train one against this model"
        )
    return found


def _train(scene: Scene, request: CorruptionMasksRequest, path: Path) -> None:
    """Once, by the main process, and kept in the run folder."""
    processes = scene.context.processes
    if processes.on_main(path.exists):
        return
    ready = calibrate(request.attack(), scene.context, scene.target, scene.verdicts.index, request.calibration)
    selector = getattr(ready, "selector", None)
    assert isinstance(selector, CorruptionModel)
    if processes.is_main:
        save_corruption_model(selector, path)
    processes.wait()


def _studied(
    scene: Scene, request: CorruptionMasksRequest, rules: Patches, selector: CorruptionModel, trained_here: bool
) -> tuple[dict[str, Any], BatchRecord]:
    model, device = scene.context.model, scene.context.processes.device
    grid = patches_in(torch.empty(1, 3, *scene.context.preprocess.shape), rules.side)
    patches = math.prod(grid)

    def by_selector(x: Tensor, rng: SampleRNG) -> Tensor:
        return strongest(-selector(normalize_like(model, x)), rules.count)

    def at_random(x: Tensor, rng: SampleRNG) -> Tensor:
        return rng.stream("patches").permutation(patches) < rules.count

    learned = _stage(scene, request, rules, "learned", by_selector)
    counts = _counts(learned)
    usual = strongest(torch.from_numpy(counts)[None], rules.count).to(device)
    found = {
        "learned": learned,
        "random": _stage(scene, request, rules, "random", at_random),
        "usual": _stage(scene, request, rules, "usual", lambda x, rng: usual.expand(len(x), -1)),
    }
    n = len(scene.verdicts.index)
    right = {who: np.concatenate([piece["right"] for piece in pieces]) for who, pieces in found.items()}
    heat = {who: _counts(found[who]) for who in ("learned", "random")}
    told = {
        "n": n,
        "trained_here": trained_here,
        "grid": list(grid),
        "side": rules.side,
        "patches": patches,
        "corrupted": rules.count,
        "fills": request.fills,
        "noise": request.noise,
        "clean": float(scene.verdicts.correct.double().mean()),
        "accuracy": {who: over_masks(each) for who, each in right.items()},
        "harm": {who: _harm(right["random"], right[who], scene.context.seed) for who in ("learned", "usual")},
        "masks": {who: {**concentration(each), "overlap": overlap(each, n)} for who, each in heat.items()},
        "overlap_by_chance": rules.count / patches,
    }
    pictures = {name: np.concatenate([piece[name] for piece in learned]) for name in ("x", "z", "chosen")}
    return told, {**pictures, **{f"heat {who}": (each / n).reshape(grid) for who, each in heat.items()}}


def _counts(pieces: Sequence[BatchRecord]) -> NDArray[Any]:
    total: NDArray[Any] = np.sum([piece["counts"] for piece in pieces], axis=0)
    return total


def _harm(random: NDArray[np.bool_], other: NDArray[np.bool_], seed: int) -> dict[str, Any]:
    """Accuracy lost beyond random masks: each image's own difference, averaged; the interval is over images."""
    difference = random.mean(1) - other.mean(1)
    low, high = bootstrap_mean(difference, seed) if len(difference) > 1 else (-1.0, 1.0)
    return {"difference": float(difference.mean()), "ci95": [low, high], "n": len(difference)}


def _stage(
    scene: Scene, request: CorruptionMasksRequest, rules: Patches, who: str, choose: Choose
) -> list[BatchRecord]:
    context, first = scene.context, scene.verdicts.index[:SHOWN]

    @torch.no_grad()
    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        counts: NDArray[Any] = np.zeros(0, np.int64)
        right, kept = [], {}
        for turn in range(request.fills):
            lots = rng.stream("fill", turn)  # the same noise for all ways of choosing
            chosen = choose(batch.x, lots)
            fill = uniform_noise(context.model, batch.x, lots.stream("noise"), request.noise)
            z = torch.where(pixel_mask(chosen, batch.x, rules.side), fill, batch.x)
            right.append(context.model(z).argmax(1) == batch.y)
            if turn == 0:  # a corruption model chooses once; of random masks the first is compared with it
                counts = chosen.sum(0).cpu().numpy()
                kept = kept_pictures(batch, first, {"x": batch.x, "z": z})
                kept["chosen"] = chosen[torch.isin(batch.indices, first).to(chosen.device)].cpu().numpy()
        return {"right": torch.stack(right, 1).cpu().numpy(), "counts": counts, **kept}

    wrong = total = 0

    def tell(piece: BatchRecord) -> str:
        nonlocal wrong, total
        wrong, total = wrong + int((~piece["right"]).sum()), total + piece["right"].size
        return f"{100 * wrong / max(total, 1):.1f} % wrong"

    return run_stage(context, f"masks {who}", scene.verdicts.index, work, tell)
