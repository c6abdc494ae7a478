"""Sources of corrupted images: made on the fly, a benchmark's own files, or its videos."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitadel.corruptions.constants import COMMON
from vitadel.corruptions.sequences import IMAGENET_SEQUENCES
from vitadel.data.batches import BadSample, Batch
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.benchmark_files import (
    StoredImages,
    VideoSequences,
    in_clean_data,
    stored_images,
    video_sequences,
)
from vitadel.evaluation.corruptions.corrupted_copy import usable_corruptions, versions
from vitadel.evaluation.corruptions.prediction_flips import sequence_stage, usual_sequences, video_stage
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.results import Origin, Predictions, PredictionSet, SequenceScores
from vitadel.evaluation.corruptions.sizes import Sizes, first_readable
from vitadel.evaluation.engine.stages import (
    BatchRecord,
    RunContext,
    clean_stage,
    refuse_lost_images,
    run_stage,
    running_share,
)
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.types import Source


class CorruptedSource(Protocol):
    """The images of a benchmark, and a model's predictions on all their versions."""

    @property
    def samples(self) -> Tensor:
        """One sample of the source for each image, which identifies the selection."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Corruptions that are not available -> the reason."""
        ...

    @property
    def origin(self) -> Origin: ...

    def predict(self, context: RunContext) -> PredictionSet: ...


def corrupted_source(target: Target, request: CorruptionRequest) -> CorruptedSource:
    """From files if the data is a benchmark itself, else made on the fly."""
    stored = stored_images(target.source, target.data_spec, request.corruptions, COMMON, request.severities)
    if stored is not None:
        _refuse(request.perturbations != (), f"{target.data_spec} has no sequences; drop --perturbations")
        left_out = _not_there(request.corruptions, COMMON, stored.corruptions, target.data_spec)
        clean = None if request.clean_data is None else in_clean_data(stored, request.clean_data, target.data_root)
        chosen = stored.chosen(request.limit, request.seed)
        origin = _on_disk("the benchmark's files", target.source, next(iter(stored.samples.values()))[chosen])
        return _FromFiles(stored, chosen, left_out, clean, origin)
    _refuse(request.clean_data is not None, "--clean-data goes with a benchmark's own files, such as imagenet-c:DIR")
    videos = video_sequences(
        target.source, request.perturbations or None, IMAGENET_SEQUENCES, request.limit, request.seed
    )
    if videos is not None:
        _refuse(bool(request.corruptions), f"{target.data_spec} has sequences only; drop --corruptions")
        left_out = _not_there(request.perturbations or None, IMAGENET_SEQUENCES, tuple(videos.frames), target.data_spec)
        origin = _on_disk("the benchmark's videos", target.source, next(iter(videos.frames.values()))[:, 0])
        return _FromVideos(videos, request.difficulty, left_out, origin)
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    sizes = Sizes.of(target.source, target.preprocess)
    usable, left_out = usable_corruptions(request.corruptions, sizes.made.shape)
    sequences = usual_sequences(sizes.made.shape) if request.perturbations is None else request.perturbations
    return _OnTheFly(indices, mislabeled, usable, request.severities, sequences, request.difficulty, left_out, sizes)


def _on_disk(made: str, source: Source, samples: Tensor) -> Origin:
    first = first_readable(source, samples.tolist())
    return Origin(made, in_memory=False, shape=(first.height, first.width))


@dataclass(frozen=True, eq=False)
class _OnTheFly:
    """Images of any data set, corrupted as they are read."""

    samples: Tensor
    mislabeled: Sequence[BadSample]
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    perturbations: tuple[str, ...]
    difficulty: int
    left_out: Mapping[str, str]
    sizes: Sizes

    @property
    def origin(self) -> Origin:
        return Origin("made on the fly", in_memory=True, shape=self.sizes.made.shape)

    def predict(self, context: RunContext) -> PredictionSet:
        verdicts = Verdicts.from_clean_stage(context, self.samples, self.mislabeled)
        predictions: Predictions = {}
        for name in self.corruptions:
            records = _corrupted_stage(context, name, verdicts.index, self.severities, self.sizes)
            for level in self.severities:
                predictions[name, level] = _column(records, f"severity {level}")
        sequences = {
            name: SequenceScores.of(sequence_stage(context, name, verdicts.index, self.difficulty, self.sizes))
            for name in self.perturbations
        }
        return PredictionSet(self.origin, verdicts, True, predictions, sequences, self.left_out)


@dataclass(frozen=True, eq=False)
class _FromFiles:
    """A benchmark's own pictures or arrays."""

    stored: StoredImages
    chosen: Tensor  # numbers of images, the same in every part
    left_out: Mapping[str, str]
    clean: tuple[Source, Tensor] | None
    origin: Origin

    @property
    def samples(self) -> Tensor:
        return next(iter(self.stored.samples.values()))[self.chosen]

    def predict(self, context: RunContext) -> PredictionSet:
        # Pictures of the model's size are left as they are; others are resized once and not cropped again.
        files = replace(context, preprocess=replace(context.preprocess, crop_pct=1.0)) if self.stored.names else context
        stages = {
            (name, level): clean_stage(files, rows[self.chosen], f"{name}/{level}")
            for (name, level), rows in self.stored.samples.items()
        }
        clean: list[BatchRecord] = []
        if self.clean is not None:
            source, rows = self.clean
            clean = clean_stage(replace(context, source=source), rows[self.chosen])
        found = {part: _asked(records) for part, records in stages.items()}
        before = _asked(clean) if clean else np.full(len(self.chosen), -1)
        columns = [*found.values(), before] if clean else list(found.values())
        kept = np.logical_and.reduce([column >= 0 for column in columns])  # readable in every version
        rows = self.chosen[torch.from_numpy(kept)]
        bad = _one_for_each_image([*stages.values(), clean])
        verdicts = Verdicts(rows, self.stored.label[rows], torch.from_numpy(before[kept]), bad)
        predictions = {part: column[kept] for part, column in found.items()}
        return PredictionSet(self.origin, verdicts, bool(clean), predictions, {}, self.left_out)


@dataclass(frozen=True, eq=False)
class _FromVideos:
    """ImageNet-P's own videos."""

    videos: VideoSequences
    difficulty: int
    left_out: Mapping[str, str]
    origin: Origin

    @property
    def samples(self) -> Tensor:
        return next(iter(self.videos.frames.values()))[:, 0]

    def predict(self, context: RunContext) -> PredictionSet:
        context = replace(context, preprocess=replace(context.preprocess, crop_pct=1.0))
        sequences = {
            name: SequenceScores.of(video_stage(context, name, self.videos, self.difficulty))
            for name in self.videos.frames
        }
        verdicts = Verdicts(self.videos.rows, self.videos.label, torch.full_like(self.videos.label, -1), [])
        return PredictionSet(self.origin, verdicts, False, {}, sequences, self.left_out)


def _corrupted_stage(
    context: RunContext, name: str, indices: Tensor, severities: Sequence[int], sizes: Sizes
) -> list[BatchRecord]:
    """Predictions on one corruption at all severities; each image is decoded once for them."""

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        record: BatchRecord = {"index": batch.indices.cpu().numpy(), "label": batch.y.cpu().numpy()}
        for level, z in versions(batch, name, severities, context.seed):
            with torch.no_grad(), context.arithmetic():
                record[f"severity {level}"] = context.model(sizes.fitted(z)).argmax(1).cpu().numpy()
        return record

    def errors(record: BatchRecord) -> tuple[float, int]:
        wrong = sum(int((record[f"severity {level}"] != record["label"]).sum()) for level in severities)
        return wrong, len(severities) * len(record["label"])

    before = replace(context, preprocess=sizes.made)
    return run_stage(before, f"corruption {name}", indices, work, running_share("wrong", errors))


def _not_there(asked: Sequence[str] | None, usual: Sequence[str], there: Sequence[str], where: str) -> dict[str, str]:
    wanted = usual if asked is None else asked
    return {name: f"not in {where}" for name in wanted if name not in there}


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise UserError(message)


def _column(records: Sequence[BatchRecord], name: str) -> NDArray[np.int64]:
    return np.concatenate([record[name] for record in records] or [np.empty(0)]).astype(np.int64)


def _asked(records: Sequence[BatchRecord]) -> NDArray[np.int64]:
    """Predictions for every selected sample; -1 for one that could not be read."""
    answers = []
    for record in records:
        answer = np.full(len(record["chunk"]), -1)
        answer[np.isin(record["chunk"], record["index"])] = record["prediction"]
        answers.append(answer)
    return np.concatenate(answers or [np.empty(0)]).astype(np.int64)


def _one_for_each_image(stages: Sequence[Sequence[BatchRecord]]) -> list[dict[str, Any]]:
    """Unreadable samples: for each image the first of its versions that could not be read."""
    found: dict[int, dict[str, Any]] = {}
    for records in stages:
        place = {int(sample): k for k, sample in enumerate(_column(records, "chunk"))}
        for entry in (entry for record in records for entry in json.loads(str(record["bad"]))):
            found.setdefault(place[entry["index"]], entry)
    return [found[image] for image in sorted(found)]
