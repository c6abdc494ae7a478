"""How every benchmark begins: a run folder, new or found again, and a bench to work at."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vitadel.evaluation.engine.batch_cache import FolderCache, MemoryCache
from vitadel.evaluation.engine.stages import RunContext
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes
from vitadel.runtime.environment import environment
from vitadel.runtime.run_folder import RunFolder, open_run, write_json

__all__ = ["Asked", "Outcome", "begun", "context_for"]


@dataclass(frozen=True)
class Outcome:
    """Results, the folder they were written to, and whether this process is the one to tell about them."""

    results: dict[str, Any]
    folder: RunFolder | None
    is_main: bool


class Asked(Protocol):
    """What the orders of all benchmarks say."""

    @property
    def batch_size(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def skip_bad(self) -> bool | None: ...


def begun(
    verb: str,
    name: str,
    settings: Mapping[str, Any],
    processes: Processes,
    *,
    out: str | Path | None,
    resume: bool,
    argv: Sequence[str] = (),
    telling: Sequence[str] = (),
) -> tuple[RunFolder, Outcome | None]:
    """The run's folder, in which a resumed run must agree in all `settings` but those that are only `telling`; and what
    came of it, if it is finished."""
    path, words = None if out is None else Path(out), list(argv or sys.argv)
    run = processes.on_main(  # only one process touches the disk
        lambda: open_run(verb, name, settings, out=path, resume=resume, argv=words, telling=telling)
    )
    if run.complete:
        return run, Outcome(json.loads((run.path / "results.json").read_text()), run, processes.is_main)
    if processes.is_main:
        write_json(run.path / "environment.json", environment(processes.device, processes.count))
    return run, None


def context_for(
    target: Target, request: Asked, processes: Processes, run: RunFolder | None, *, shown: bool = False, **more: Any
) -> RunContext:
    """The subject's model and data, on the device, with pieces kept in the folder; `more` are further fields."""
    return RunContext(
        model=target.model.to(processes.device),
        source=target.source,
        preprocess=target.preprocess,
        cache=MemoryCache() if run is None else FolderCache(run),
        processes=processes,
        batch_size=request.batch_size,
        seed=request.seed,
        classes=target.model.record.num_classes,
        skip_bad=request.skip_bad,
        shown=shown,
        **more,
    )
