"""The suite `corruptions`: errors by corruption and severity, mCE, and flips along sequences (arXiv:1903.12261).

Images are corrupted on the fly, from the random streams of their samples, or read from a benchmark's own files. One
forward pass per image, corruption and severity; only predictions are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from vitadel.evaluation.corruptions.corrupted_sources import corrupted_source
from vitadel.evaluation.corruptions.request import CorruptionRequest
from vitadel.evaluation.corruptions.results import corruption_results, corruption_samples
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, request_from, run_settings
from vitadel.evaluation.engine.target import Target, apply_class_subset, open_target
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes, join_processes
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
    """Run the benchmark from Python; returns the content of `results.json`. `settings` are those of
    `CorruptionRequest`."""
    request = request_from(CorruptionRequest, "corruptions", settings)
    skip_bad, processes = bool(request.skip_bad), join_processes(device)
    target = open_target(model, data, data_root=data_root, model_options=model_options, skip_bad=skip_bad)
    in_memory = processes.count == 1
    return run_corruptions(target, request, processes, out=out, resume=resume, in_memory=in_memory).results


def run_corruptions(
    target: Target, request: CorruptionRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    target = apply_class_subset(target)
    source = corrupted_source(target, request)
    settings = run_settings(
        target,
        request,
        source.samples,
        suite="corruptions",
        left_out=sorted(source.left_out),
        corrupted_at=list(source.origin.shape),
    )

    def work(run: Run) -> dict[str, Any]:
        context = run.context(target, request, precision=request.precision)
        with frozen(context.model):
            found = source.predict(context)
        run.write("samples.parquet", corruption_samples(found))
        return corruption_results(target, request, found, settings)

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        return run_corruptions(target, replace(request, limit=few), alone, **watched)

    trial = Trial(len(source.samples), on_few)
    return execute("audit", target.model_spec, settings, processes, work, target=target, trial=trial, **options)
