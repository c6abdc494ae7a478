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

from vitadel.errors import Interrupted, Mistake
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, bench_for
from vitadel.evaluation.corruptions.request import CorruptionOrder
from vitadel.evaluation.corruptions.results import corruption_results, corruption_samples
from vitadel.evaluation.corruptions.suppliers import Supply, supply_for
from vitadel.evaluation.engine.target import Subject, open_subject
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
    known = [each.name for each in dataclasses.fields(CorruptionOrder)]
    for name in settings:
        if name not in known:
            raise Mistake(f"corruptions has no setting '{name}'; it takes {', '.join(known)}")
    order = CorruptionOrder(**settings)
    subject = open_subject(model, data, data_root=data_root, model_options=model_options, skip_bad=order.skip_bad)
    return run_corruptions(subject, order, join_processes(device), out=out, resume=resume).results


def run_corruptions(
    subject: Subject,
    order: CorruptionOrder,
    processes: Processes,
    *,
    out: str | Path | None = None,
    in_folder: bool = False,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> Outcome:
    """Run the benchmark, in a run folder if `out` names one or `in_folder` asks for a new one below runs/."""
    subject = choose_among(subject)
    supply = supply_for(subject, order)
    settings = _settings(subject, order, supply)
    run = None
    if out is not None or in_folder or processes.count > 1:
        run, done = begun("audit", subject.model_spec, settings, processes, out=out, resume=resume, argv=argv)
        if done is not None:
            return done
    bench = bench_for(subject, order, processes, run, shown=shown, precision=order.precision)
    try:
        with frozen(bench.model):
            gathered = supply.gather(bench)
    except KeyboardInterrupt:
        if run is None:
            raise
        raise Interrupted(run.path) from None
    results = corruption_results(subject, order, gathered, settings)
    if run and processes.is_main:
        write_atomically(run.path / "samples.parquet", corruption_samples(gathered))
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)


def _settings(subject: Subject, order: CorruptionOrder, supply: Supply) -> dict[str, Any]:
    """What a resumed run must agree with; also which corruptions were to be had."""
    return {
        "model": subject.model_spec,
        "model_fingerprint": subject.model_fingerprint(),
        "data": subject.data_spec,
        "data_fingerprint": subject.data_fingerprint(supply.samples),
        "suite": "corruptions",
        **dataclasses.asdict(order),
        "left_out": sorted(supply.left_out),
        "corrupted_at": list(supply.origin.shape),
    }
