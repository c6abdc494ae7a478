"""The runner of all studies: clean predictions, the work of the study, and its results."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitadel.attacks.threats import make_threat
from vitadel.data.batches import Batch
from vitadel.evaluation.engine.attack_preparation import calibrate, check_calibration
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import (
    Outcome,
    Run,
    RunOptions,
    RunRequest,
    describe_target,
    execute,
    result_header,
    run_settings,
)
from vitadel.evaluation.engine.stages import (
    BatchRecord,
    RunContext,
    Verdict,
    check_budget,
    judge,
    refuse_lost_images,
    rules_of,
    run_stage,
)
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder
from vitadel.types import Attack, Threat

VERB = "study"

SHOWN = 8
"""Images that are saved for figures."""


@dataclass(frozen=True, kw_only=True)
class StudyRequest(RunRequest):
    """What the requests of all studies share, besides settings of their own."""

    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.norm, self.eps)
        make_threat(self.norm, self.eps)


@dataclass(frozen=True)
class StudyContext:
    """What a study works with. The model is frozen, on its device, and restricted to the benchmark's classes.

    `verdicts` has the images that could be read, their labels and clean predictions. Work that must survive kill -9
    goes through `stage` or the stages of the engine, which save every batch in the run folder.
    """

    context: RunContext
    target: Target
    verdicts: Verdicts
    threat: Threat
    folder: RunFolder

    @property
    def model(self) -> nn.Module:
        return self.context.model

    @property
    def shown(self) -> Tensor:
        """Indices of the images that figures show."""
        return self.verdicts.index[:SHOWN]

    def calibrate(self, attack: Attack, calibration: str | None) -> Attack:
        """Prepare an attack that needs it, on images that are not studied."""
        check_calibration([attack], self.target, self.verdicts.index, calibration, self.context.seed)
        return calibrate(attack, self.context, self.target, self.verdicts.index, calibration)

    def stage(
        self,
        name: str,
        work: Callable[[Batch, SampleRNG], BatchRecord],
        note: Callable[[BatchRecord], str] = lambda record: "",
    ) -> list[BatchRecord]:
        """Run `work` on all images batch by batch, with a random stream per image."""

        def with_rng(number: int, batch: Batch) -> BatchRecord:
            refuse_lost_images(batch)
            return work(batch, SampleRNG.of_samples(self.context.seed, batch.indices, self.context.processes.device))

        return run_stage(self.context, name, self.verdicts.index, with_rng, note)

    def attack(self, attack: Attack, batch: Batch, rng: SampleRNG) -> tuple[Tensor, Verdict]:
        """Attack a batch and judge the result on the deployed model."""
        rules = rules_of(attack)
        z = attack(self.model, batch.x, batch.y, rng)
        return z, judge(self.model, rules(self.model, batch.x) if rules else self.threat, batch.x, z, batch.y)


def column(records: Sequence[BatchRecord], name: str) -> NDArray[Any]:
    """One array over all batches."""
    return np.concatenate([record[name] for record in records])


def pixels_in_8_bits(batch: Batch, shown: Tensor, images: Mapping[str, Tensor]) -> BatchRecord:
    """The images of the batch whose indices are among `shown`, as bytes."""
    rows = torch.isin(batch.indices, shown)
    chosen = {name: each[rows.to(each.device)] for name, each in images.items()}
    return {name: (255 * each).round().to(torch.uint8).cpu().numpy() for name, each in chosen.items()}


Work = Callable[[StudyContext], tuple[dict[str, Any], BatchRecord]]
"""The study itself: its numbers for `results.json`, and arrays for `study.npz`, which may be none."""


def run_study(
    name: str,
    target: Target,
    request: StudyRequest,
    processes: Processes,
    work: Work,
    *,
    inputs: Mapping[str, Any] | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Do the work of a study in a run folder. `inputs` replace fields of the request in the recorded settings: a file
    by its content."""
    target = apply_class_subset(target)
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    settings = run_settings(target, request, indices, study=name) | dict(inputs or {})

    def measure(run: Run) -> dict[str, Any]:
        context = run.context(target, request)
        with frozen(context.model):
            verdicts = Verdicts.from_clean_stage(context, indices, mislabeled)
            threat = make_threat(request.norm, request.eps)
            measured, arrays = work(StudyContext(context, target, verdicts, threat, RunFolder(run.path)))
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **cast(dict[str, Any], arrays))
            run.write("study.npz", buffer.getvalue())
        return {
            **result_header(request.seed),
            **describe_target(target, settings["model_fingerprint"], len(verdicts.index), verdicts.bad),
            "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
            "batch_size": request.batch_size,
            "study": {"name": name, **measured},
        }

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        return run_study(name, target, replace(request, limit=few), alone, work, inputs=inputs, **watched)

    trial, title = Trial(len(indices), on_few), f"{name}-{target.model_spec}"
    return execute(VERB, title, settings, processes, measure, target=target, trial=trial, **options)
