"""From predictions on corrupted images to what others read: `results.json` and `samples.parquet`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vitadel.corruptions.constants import COMMON, SEVERITIES
from vitadel.corruptions.sequences import IMAGENET_SEQUENCES, NOISE_SEQUENCES
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.perturbations import usual_sequences
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.scores import (
    ALEXNET_CLEAN_ERROR,
    ALEXNET_ERRORS,
    ALEXNET_FLIPS,
    NOISE,
    corruption_errors,
    flip_rates,
    relative_corruption_errors,
)
from vitadel.evaluation.corruptions.sizes import IMAGENET_SHAPE
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, described, heading
from vitadel.evaluation.intervals import bootstrap_mean, share
from vitadel.types import Source

__all__ = ["Course", "Gathered", "Origin", "Predictions", "corruption_results", "corruption_samples"]

Predictions = dict[tuple[str, int], NDArray[np.int64]]
"""(corruption, severity) -> a class for each image."""

_IN_MEMORY = (
    "Made in memory: ImageNet-C's own files went through JPEG once more, which moves errors by some percent. Use "
    "imagenet-c:DIR for numbers beside published ones."
)
_FILMED_IN_MEMORY = (
    "Made in memory: ImageNet-P's own videos are compressed, which hides some of the noise. Use imagenet-p:DIR for "
    "numbers beside published ones."
)
_NO_ALEXNET = "Not ImageNet-1k, so errors are not divided by AlexNet's: read mean_error, and never beside an mCE."
_NO_CLEAN = "Clean images are not part of the benchmark's files: no relative mCE. Give them with --clean-data."


@dataclass(frozen=True, eq=False)
class Course:
    """Predictions along the sequences of one perturbation: per image, a share of flips and a mean top-5 distance."""

    flips: NDArray[np.float64]
    distance: NDArray[np.float64]
    frames: int

    @classmethod
    def of(cls, pieces: Sequence[BatchRecord]) -> Course:
        flips, distance = (np.concatenate([piece[name] for piece in pieces]) for name in ("flips", "distance"))
        return cls(flips, distance, int(pieces[0]["frames"]))


@dataclass(frozen=True)
class Origin:
    """Where corrupted images come from, and the (height, width) that they were corrupted at."""

    told: str
    in_memory: bool
    shape: tuple[int, int]

    @property
    def as_benchmark(self) -> bool:
        """Of the size that AlexNet's numbers are for: at another the same severity is stronger or weaker."""
        return self.shape == IMAGENET_SHAPE

    def remarks(self, in_memory: str) -> list[str]:
        """What keeps numbers on ImageNet's classes from being compared with published ones."""
        (height, width), (usual, _) = self.shape, IMAGENET_SHAPE
        size = f"Corrupted at {height} x {width} pixels, and the benchmark at {usual} x {usual}: no mCE and no mFR."
        return [*([in_memory] if self.in_memory else []), *([] if self.as_benchmark else [size])]


@dataclass(frozen=True, eq=False)
class Gathered:
    """All predictions, in the order of `tally`; its own predictions are those on clean images, if these are known."""

    origin: Origin
    verdicts: Verdicts
    clean_known: bool
    predictions: Predictions
    courses: Mapping[str, Course]
    left_out: Mapping[str, str]

    def wrong(self, corruption: str, severity: int) -> NDArray[np.bool_]:
        return np.asarray(self.predictions[corruption, severity] != self.verdicts.label.numpy())


def corruption_results(
    target: Target, request: CorruptionRequest, gathered: Gathered, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that every audit has, and `corruptions` and `perturbations`, each where run."""
    verdicts, imagenet = gathered.verdicts, _is_imagenet(target.source)
    if len(verdicts.index) == 0:
        raise UserError("no image could be read in all its versions, so there is nothing to count")
    clean = (
        share(int(verdicts.correct.sum()), len(verdicts.index), "correct", "accuracy") if gathered.clean_known else None
    )
    results = {
        **heading(request.seed, suite="corruptions"),
        **described(target, verdicts, settings["model_fingerprint"]),
        "batch_size": request.batch_size,
        "precision": request.precision,
        "clean": clean,
        "attacks": [],
        "worst_case": None,
        "findings": [],
    }
    if gathered.predictions:
        results["corruptions"] = _corruptions(gathered, request, imagenet)
    if gathered.courses:
        results["perturbations"] = _perturbations(gathered, request, imagenet)
    return results


def corruption_samples(gathered: Gathered) -> bytes:
    """`samples.parquet`: per image its prediction at each corruption and severity, and its flips per perturbation."""
    verdicts, known = gathered.verdicts, gathered.clean_known
    empty = pa.nulls(len(verdicts.index))
    columns: dict[str, Any] = {
        "index": verdicts.index.numpy(),
        "label": verdicts.label.numpy(),
        "clean_prediction": verdicts.prediction.numpy() if known else empty.cast(pa.int64()),
        "clean_correct": verdicts.correct.numpy() if known else empty.cast(pa.bool_()),
    }
    columns |= {f"prediction:{name}/{level}": column for (name, level), column in gathered.predictions.items()}
    columns |= {f"flips:{name}": course.flips for name, course in gathered.courses.items()}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _is_imagenet(source: Source) -> bool:
    if len(source.classes) != 1000:
        return False
    from vitadel.data.sources.imagenet import (
        named_like_imagenet,  # here, as it needs timm, which takes seconds to import
    )

    return named_like_imagenet(source.classes)


def _corruptions(gathered: Gathered, request: CorruptionRequest, imagenet: bool) -> dict[str, Any]:
    names = list(dict.fromkeys(name for name, _ in gathered.predictions))
    counted = [name for name in names if name in COMMON] or names
    n = len(gathered.verdicts.index)
    wrong = {name: {level: gathered.wrong(name, level) for level in request.severities} for name in names}
    cells = [
        {
            "corruption": name,
            "severity": level,
            **share(n - int(column.sum()), n, "correct", "accuracy"),
            "error": float(column.mean()),
        }
        for name, by in wrong.items()
        for level, column in by.items()
    ]
    rows = [_row(name, {level: float(column.mean()) for level, column in by.items()}) for name, by in wrong.items()]
    # Per image: the share of versions that it is wrong in. Means over images of such sums are all the scores below.
    own = {name: np.mean(list(by.values()), axis=0) for name, by in wrong.items()}
    told = {
        "made": gathered.origin.told,
        "corrupted_at": list(gathered.origin.shape),
        "severities": list(request.severities),
        "n": n,
        "cells": cells,
        "rows": rows,
        "mean_error_over": counted,
        **_interval("mean_error", np.mean([own[name] for name in counted], axis=0), request.seed),
        "left_out": dict(gathered.left_out),
        "remarks": _remarks(gathered, imagenet),
    }
    if imagenet:
        told |= _against_alexnet(gathered, request, {name: wrong[name] for name in names if name in COMMON}, rows)
    return told


def _row(name: str, errors: Mapping[int, float]) -> dict[str, Any]:
    error = sum(errors.values()) / len(errors)
    return {"corruption": name, "error": error, "accuracy": 1 - error, "part_of_mce": name in COMMON}


def _against_alexnet(
    gathered: Gathered,
    request: CorruptionRequest,
    wrong: Mapping[str, Mapping[int, NDArray[np.bool_]]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """CE, mCE and relatives. `mce` is only what goes by that name: 15 corruptions at 5 severities and the size of
    the benchmark; else null."""
    whole = set(request.severities) == set(SEVERITIES) and gathered.origin.as_benchmark
    ce, relative = _by_image(wrong), None
    if gathered.clean_known:
        relative = _by_image(wrong, (~gathered.verdicts.correct).numpy())
    for row in rows:
        if row["corruption"] in ce:
            row["ce"] = float(ce[row["corruption"]].mean())
            row["relative_ce"] = None if relative is None else float(relative[row["corruption"]].mean())
    quiet = [name for name in COMMON if name not in NOISE]

    def mean(name: str, scores: Mapping[str, NDArray[np.float64]] | None, over: Sequence[str]) -> dict[str, Any]:
        if scores is None or not over or not set(over) <= set(scores):
            return {name: None, f"{name}_ci95": None}
        return _interval(name, np.mean([scores[each] for each in over], axis=0), request.seed)

    return {
        **mean("mean_ce", ce, list(ce)),
        "mean_ce_over": list(ce),
        **mean("mce", ce if whole else None, COMMON),
        **mean("relative_mce", relative if whole else None, COMMON),
        **mean("mce_without_noise", ce if whole else None, quiet),
        "constants": {
            "alexnet_errors": "torchvision's AlexNet on the JPEG files, all 50,000 images, by the benchmark's author",
            "alexnet_mean_errors": {name: sum(by.values()) / len(by) for name, by in ALEXNET_ERRORS.items()},
            "alexnet_clean_error": ALEXNET_CLEAN_ERROR,
            "alexnet_clean_error_is": "recalled from the literature; relative_mce depends on it",
        },
    }


def _by_image(
    wrong: Mapping[str, Mapping[int, NDArray[np.bool_]]], clean_wrong: NDArray[np.bool_] | None = None
) -> dict[str, NDArray[np.float64]]:
    """What each image adds to the (relative) CE of each corruption: the CE is the mean of it."""
    found = {}
    for name, by in wrong.items():
        one = {name: dict.fromkeys(by, 1.0)}
        own = np.mean(list(by.values()), axis=0)
        if clean_wrong is None:
            found[name] = own * corruption_errors(one)[name]
        else:
            found[name] = (own - clean_wrong) * relative_corruption_errors(one, 0.0)[name]
    return found


def _perturbations(gathered: Gathered, request: CorruptionRequest, imagenet: bool) -> dict[str, Any]:
    courses, seed = gathered.courses, request.seed
    counted = [name for name in usual_sequences(gathered.origin.shape) if name in courses] or list(courses)
    rows = []
    for name, course in courses.items():
        row: dict[str, Any] = {"perturbation": name, "noise": name in NOISE_SEQUENCES, "counted": name in counted}
        row |= {"frames": course.frames, "n": len(course.flips)}
        row |= _interval("flip_probability", course.flips, seed)
        row |= _interval("top5_distance", course.distance, seed)
        rows.append(row)
    told = {
        "made": gathered.origin.told,
        "corrupted_at": list(gathered.origin.shape),
        "difficulty": request.difficulty,
        "rows": rows,
        "mean_flip_probability_over": counted,
        **_interval("mean_flip_probability", np.mean([courses[name].flips for name in counted], axis=0), seed),
        **_interval("mean_top5_distance", np.mean([courses[name].distance for name in counted], axis=0), seed),
        "left_out": {} if gathered.predictions else dict(gathered.left_out),
        "remarks": gathered.origin.remarks(_FILMED_IN_MEMORY) if imagenet else [],
    }
    if imagenet and request.difficulty == 1:
        told |= _flips_against_alexnet(gathered, seed, rows)
    return told


def _flips_against_alexnet(gathered: Gathered, seed: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Flip rates of what AlexNet's are known for; `mfr` if all ten are there, whatever else is, else null."""
    courses = gathered.courses
    rates = flip_rates({name: 1.0 for name in courses if name in ALEXNET_FLIPS})
    for row in rows:
        if row["perturbation"] in rates:
            row["flip_rate"] = row["flip_probability"] * rates[row["perturbation"]]
    mfr: dict[str, Any] = {"mfr": None, "mfr_ci95": None}
    if gathered.origin.as_benchmark and set(IMAGENET_SEQUENCES) <= set(rates):
        mfr = _interval(
            "mfr", np.mean([courses[name].flips * rates[name] for name in IMAGENET_SEQUENCES], axis=0), seed
        )
    return {
        **mfr,
        "constants": {
            "alexnet_flip_probabilities": dict(ALEXNET_FLIPS),
            "these_are": "recalled from a later paper (arXiv:1904.11486), not from the benchmark's code",
        },
    }


def _interval(name: str, values: NDArray[np.float64], seed: int) -> dict[str, Any]:
    """A mean over images, and its interval by a bootstrap over them."""
    return {name: float(values.mean()), f"{name}_ci95": list(bootstrap_mean(values, seed))}


def _remarks(gathered: Gathered, imagenet: bool) -> list[str]:
    remarks = gathered.origin.remarks(_IN_MEMORY) if imagenet else [_NO_ALEXNET]
    return remarks + ([] if gathered.clean_known else [_NO_CLEAN])
