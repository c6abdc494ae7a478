"""The runner of all studies: clean predictions, the work of the study, and its results."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np

from vitadel.attacks.threats import make_threat
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.class_subset import apply_class_subset
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, RunRequest, execute, run_settings
from vitadel.evaluation.engine.stages import RunContext, check_budget
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, describe_target, result_header
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.runtime.run_folder import RunFolder
from vitadel.types import Threat

__all__ = ["Scene", "StudyRequest", "Work", "run_study"]

VERB = "study"


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
class Scene:
    """What a study has to work with. The model is frozen, on its device, and chooses among the benchmark's classes.

    `tally` knows the images that could be read, their labels and the model's clean answers. Work that is to survive
    kill -9 goes through `evaluation.stages.run_stage` and its like, which keep pieces in the folder.
    """

    context: RunContext
    target: Target
    verdicts: Verdicts
    threat: Threat
    folder: RunFolder


Work = Callable[[Scene], tuple[dict[str, Any], BatchRecord]]
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
            measured, arrays = work(Scene(context, target, verdicts, threat, RunFolder(run.path)))
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **cast(dict[str, Any], arrays))
            run.write("study.npz", buffer.getvalue())
        return {
            **result_header(request.seed),
            **describe_target(target, verdicts, settings["model_fingerprint"]),
            "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
            "batch_size": request.batch_size,
            "study": {"name": name, **measured},
        }

    return execute(VERB, f"{name}-{target.model_spec}", settings, processes, measure, target=target, **options)
