"""The suite `corruptions`: errors by corruption and severity, mCE, and flips along sequences (arXiv:1903.12261).

Images are corrupted on the fly, from the streams of their samples, or read from a benchmark's own files. One forward
per image, corruption and severity; only predictions are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.results import corruption_results, corruption_samples
from vitadel.evaluation.corruptions.suppliers import Supply, supply_for
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, context_for
from vitadel.evaluation.engine.target import Target, open_target
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.types import Source

__all__ = ["corruptions", "run_corruptions"]


def corruptions(
    model: str | nn.Module,
    data: str | Source,
    *,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The benchmark from Python; returns what `results.json` holds. `settings` are those of `CorruptionOrder`."""
    known = [each.name for each in dataclasses.fields(CorruptionRequest)]
    for name in settings:
        if name not in known:
            raise UserError(f"corruptions has no setting '{name}'; it takes {', '.join(known)}")
    request = CorruptionRequest(**settings)
    target = open_target(model, data, data_root=data_root, model_options=model_options, skip_bad=request.skip_bad)
    return run_corruptions(target, request, join_processes(device), out=out, resume=resume).results


def run_corruptions(
    target: Target,
    request: CorruptionRequest,
    processes: Processes,
    *,
    out: str | Path | None = None,
    in_folder: bool = False,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> Outcome:
    """Run the benchmark, in a run folder if `out` names one or `in_folder` asks for a new one below runs/."""
    target = choose_among(target)
    supply = supply_for(target, request)
    settings = _settings(target, request, supply)
    run = None
    if out is not None or in_folder or processes.count > 1:
        run, done = begun("audit", target.model_spec, settings, processes, out=out, resume=resume, argv=argv)
        if done is not None:
            return done
    context = context_for(target, request, processes, run, shown=shown, precision=request.precision)
    try:
        with frozen(context.model):
            gathered = supply.gather(context)
    except KeyboardInterrupt:
        if run is None:
            raise
        raise Interrupted(run.path) from None
    results = corruption_results(target, request, gathered, settings)
    if run and processes.is_main:
        write_atomically(run.path / "samples.parquet", corruption_samples(gathered))
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)


def _settings(target: Target, request: CorruptionRequest, supply: Supply) -> dict[str, Any]:
    """What a resumed run must agree with; also which corruptions were to be had."""
    return {
        "model": target.model_spec,
        "model_fingerprint": target.model_fingerprint(),
        "data": target.data_spec,
        "data_fingerprint": target.data_fingerprint(supply.samples),
        "suite": "corruptions",
        **dataclasses.asdict(request),
        "left_out": sorted(supply.left_out),
        "corrupted_at": list(supply.origin.shape),
    }
