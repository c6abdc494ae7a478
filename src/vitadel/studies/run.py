"""How every study goes: a run folder, clean predictions, its own work at a bench, and what came of it written down."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from vitadel.attacks.threats import make_threat
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, context_for
from vitadel.evaluation.engine.stages import RunContext, clean_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts, described, heading
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.run_folder import RunFolder, write_atomically, write_json
from vitadel.types import Threat

__all__ = ["Running", "Scene", "StudyRequest", "Work", "check_request", "conducted"]

VERB = "study"


@dataclass(frozen=True, kw_only=True)
class StudyRequest:
    """What the orders of all studies say, besides settings of their own; every field decides the result."""

    eps: float = 8 / 255
    norm: str = "linf"
    limit: int | None = 200
    batch_size: int = 64
    seed: int = 0
    skip_bad: bool = False


class Running(TypedDict, total=False):
    """Where a study is written, whether it goes on with what is there, and how it is told."""

    out: str | Path | None
    resume: bool
    shown: bool
    argv: Sequence[str]


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


def check_request(request: StudyRequest) -> None:
    """What all orders must agree to, told before anything is loaded."""
    if request.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {request.batch_size}")
    if request.norm == "linf" and request.eps == 1:
        raise UserError("eps 1 lets every pixel become anything: pixels are in [0, 1] here. Did you mean 1/255?")
    make_threat(request.norm, request.eps)


def conducted(
    name: str,
    target: Target,
    request: StudyRequest,
    processes: Processes,
    work: Work,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
) -> Outcome:
    """Do the work in a run folder, by default a new one below runs/.

    A resumed study must agree in the whole order. `inputs` are fields of it by another name: a file by its content.
    """
    target = choose_among(target)
    indices, mislabelled = target.selection(request.limit, request.seed, request.skip_bad)
    asked = dataclasses.asdict(cast(Any, request))
    settings = {
        "study": name,
        "model": target.model_spec,
        "model_fingerprint": target.model_fingerprint(),
        "data": target.data_spec,
        "data_fingerprint": target.data_fingerprint(indices),
        **asked,
        "eps": quantity_text(request.eps),
        **(inputs or {}),
    }
    run, done = begun(VERB, f"{name}-{target.model_spec}", settings, processes, out=out, resume=resume, argv=argv)
    if done is not None:
        return done
    context = context_for(target, request, processes, run, shown=shown)
    try:
        with frozen(context.model):
            verdicts = Verdicts.of_clean(clean_stage(context, indices), mislabelled)
            if len(verdicts.index) == 0:
                raise UserError("no sample could be read, so there is nothing to study; see why with --skip-bad off")
            told, arrays = work(Scene(context, target, verdicts, make_threat(request.norm, request.eps), run))
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    results = {
        **heading(request.seed),
        **described(target, verdicts, settings["model_fingerprint"]),
        "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
        "batch_size": request.batch_size,
        "study": {"name": name, **told},
    }
    if processes.is_main:
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **cast(dict[str, Any], arrays))
            write_atomically(run.path / "study.npz", buffer.getvalue())
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)
