"""Result fields and sample table of a corruption benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vitadel.corruptions.constants import COMMON, SEVERITIES
from vitadel.corruptions.sequences import IMAGENET_SEQUENCES, NOISE_SEQUENCES
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.prediction_flips import usual_sequences
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
from vitadel.evaluation.engine.run import describe_target, result_header
from vitadel.evaluation.engine.stages import BatchRecord
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, parquet_bytes
from vitadel.statistics import bootstrap_mean, share
from vitadel.types import Source

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
class SequenceScores:
    """Predictions along the sequences of one perturbation: per image, a share of flips and a mean top-5 distance."""

    flips: NDArray[np.float64]
    distance: NDArray[np.float64]
    frames: int

    @classmethod
    def of(cls, records: Sequence[BatchRecord]) -> SequenceScores:
        flips, distance = (np.concatenate([record[name] for record in records]) for name in ("flips", "distance"))
        return cls(flips, distance, int(records[0]["frames"]))


@dataclass(frozen=True)
class Origin:
    """Where corrupted images come from, and the (height, width) that they were corrupted at."""

    made: str  # as the results say it
    in_memory: bool
    shape: tuple[int, int]

    @property
    def as_benchmark(self) -> bool:
        """Whether images have the size of AlexNet's numbers: at other sizes the same severity is stronger or weaker."""
        return self.shape == IMAGENET_SHAPE

    def remarks(self, in_memory: str) -> list[str]:
        """Why numbers on ImageNet's classes are not comparable with published ones."""
        (height, width), (usual, _) = self.shape, IMAGENET_SHAPE
        size = f"Corrupted at {height} x {width} pixels, and the benchmark at {usual} x {usual}: no mCE and no mFR."
        return [*([in_memory] if self.in_memory else []), *([] if self.as_benchmark else [size])]


@dataclass(frozen=True, eq=False)
class PredictionSet:
    """All predictions, in the order of `verdicts`, whose own predictions are those on clean images, if known."""

    origin: Origin
    verdicts: Verdicts
    clean_known: bool
    predictions: Predictions
    sequences: Mapping[str, SequenceScores]
    left_out: Mapping[str, str]

    def wrong(self, corruption: str, severity: int) -> NDArray[np.bool_]:
        return np.asarray(self.predictions[corruption, severity] != self.verdicts.label.numpy())


def corruption_results(
    target: Target, request: CorruptionRequest, found: PredictionSet, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields that every audit has, and `corruptions` and `perturbations`, each where run."""
    verdicts, imagenet = found.verdicts, _is_imagenet(target.source)
    if len(verdicts.index) == 0:
        raise UserError("no sample could be read in all its versions, so there is nothing to evaluate")
    clean = verdicts.summary()["clean"] if found.clean_known else None
    results = {
        **result_header(request.seed, suite="corruptions"),
        **describe_target(target, settings["model_fingerprint"], len(verdicts.index), verdicts.bad),
        "batch_size": request.batch_size,
        "precision": request.precision,
        "clean": clean,
        "attacks": [],
        "worst_case": None,
        "findings": [],
    }
    if found.predictions:
        results["corruptions"] = _corruptions(found, request, imagenet)
    if found.sequences:
        results["perturbations"] = _perturbations(found, request, imagenet)
    return results


def corruption_samples(found: PredictionSet) -> bytes:
    """`samples.parquet`: per image its prediction at each corruption and severity, and its flips per perturbation."""
    verdicts, known = found.verdicts, found.clean_known
    empty = pa.nulls(len(verdicts.index))
    columns: dict[str, Any] = {
        "index": verdicts.index,
        "label": verdicts.label,
        "clean_prediction": verdicts.prediction if known else empty.cast(pa.int64()),
        "clean_correct": verdicts.correct if known else empty.cast(pa.bool_()),
    }
    columns |= {f"prediction:{name}/{level}": column for (name, level), column in found.predictions.items()}
    columns |= {f"flips:{name}": scores.flips for name, scores in found.sequences.items()}
    return parquet_bytes(columns)


def _is_imagenet(source: Source) -> bool:
    if len(source.classes) != 1000:
        return False
    from vitadel.data.sources.imagenet import (
        named_like_imagenet,  # here, as it needs timm, which takes seconds to import
    )

    return named_like_imagenet(source.classes)


def _corruptions(found: PredictionSet, request: CorruptionRequest, imagenet: bool) -> dict[str, Any]:
    names = list(dict.fromkeys(name for name, _ in found.predictions))
    counted = [name for name in names if name in COMMON] or names
    n = len(found.verdicts.index)
    wrong = {name: {level: found.wrong(name, level) for level in request.severities} for name in names}
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
    summary = {
        "made": found.origin.made,
        "corrupted_at": list(found.origin.shape),
        "severities": list(request.severities),
        "n": n,
        "cells": cells,
        "rows": rows,
        "mean_error_over": counted,
        **_interval("mean_error", np.mean([own[name] for name in counted], axis=0), request.seed),
        "left_out": dict(found.left_out),
        "remarks": _remarks(found, imagenet),
    }
    if imagenet:
        summary |= _against_alexnet(found, request, {name: wrong[name] for name in names if name in COMMON}, rows)
    return summary


def _row(name: str, errors: Mapping[int, float]) -> dict[str, Any]:
    error = sum(errors.values()) / len(errors)
    return {"corruption": name, "error": error, "accuracy": 1 - error, "part_of_mce": name in COMMON}


def _against_alexnet(
    found: PredictionSet,
    request: CorruptionRequest,
    wrong: Mapping[str, Mapping[int, NDArray[np.bool_]]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """CE, mCE and relatives. `mce` needs 15 corruptions at 5 severities and the size of the benchmark; else null."""
    whole = set(request.severities) == set(SEVERITIES) and found.origin.as_benchmark
    ce, relative = _by_image(wrong), None
    if found.clean_known:
        relative = _by_image(wrong, (~found.verdicts.correct).numpy())
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
    """The contribution of each image to the (relative) CE of each corruption, which is their mean."""
    found = {}
    for name, by in wrong.items():
        one = {name: dict.fromkeys(by, 1.0)}
        own = np.mean(list(by.values()), axis=0)
        if clean_wrong is None:
            found[name] = own * corruption_errors(one)[name]
        else:
            found[name] = (own - clean_wrong) * relative_corruption_errors(one, 0.0)[name]
    return found


def _perturbations(found: PredictionSet, request: CorruptionRequest, imagenet: bool) -> dict[str, Any]:
    sequences, seed = found.sequences, request.seed
    counted = [name for name in usual_sequences(found.origin.shape) if name in sequences] or list(sequences)
    rows = []
    for name, scores in sequences.items():
        row: dict[str, Any] = {"perturbation": name, "noise": name in NOISE_SEQUENCES, "counted": name in counted}
        row |= {"frames": scores.frames, "n": len(scores.flips)}
        row |= _interval("flip_probability", scores.flips, seed)
        row |= _interval("top5_distance", scores.distance, seed)
        rows.append(row)
    summary = {
        "made": found.origin.made,
        "corrupted_at": list(found.origin.shape),
        "difficulty": request.difficulty,
        "rows": rows,
        "mean_flip_probability_over": counted,
        **_interval("mean_flip_probability", np.mean([sequences[name].flips for name in counted], axis=0), seed),
        **_interval("mean_top5_distance", np.mean([sequences[name].distance for name in counted], axis=0), seed),
        "left_out": {} if found.predictions else dict(found.left_out),
        "remarks": found.origin.remarks(_FILMED_IN_MEMORY) if imagenet else [],
    }
    if imagenet and request.difficulty == 1:
        summary |= _flips_against_alexnet(found, seed, rows)
    return summary


def _flips_against_alexnet(found: PredictionSet, seed: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Flip rates where AlexNet's are known; `mfr` if all ten are there, else null."""
    sequences = found.sequences
    rates = flip_rates({name: 1.0 for name in sequences if name in ALEXNET_FLIPS})
    for row in rows:
        if row["perturbation"] in rates:
            row["flip_rate"] = row["flip_probability"] * rates[row["perturbation"]]
    mfr: dict[str, Any] = {"mfr": None, "mfr_ci95": None}
    if found.origin.as_benchmark and set(IMAGENET_SEQUENCES) <= set(rates):
        mfr = _interval(
            "mfr", np.mean([sequences[name].flips * rates[name] for name in IMAGENET_SEQUENCES], axis=0), seed
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


def _remarks(found: PredictionSet, imagenet: bool) -> list[str]:
    remarks = found.origin.remarks(_IN_MEMORY) if imagenet else [_NO_ALEXNET]
    return remarks + ([] if found.clean_known else [_NO_CLEAN])
