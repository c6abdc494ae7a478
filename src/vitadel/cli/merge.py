"""`vitadel merge`: one run from the shards of an audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.audit import GateFlags
from vitadel.cli.execution import present
from vitadel.cli.options import RunFlags, expand_groups, option


@expand_groups
def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders that were --out of the shards")],
    gates: GateFlags = GateFlags(),
    out: Annotated[Path | None, option("folder of the whole run; needed for several RUN")] = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Make one run of the shards of an audit.

    The files are those of one process without --shard. What depends on all images is computed now: sentinels and
    escalation of autoattack-fast, findings, examples.
    """
    from vitadel.diagnosis.precheck import run_precheck
    from vitadel.evaluation.audit.audit_shards import merge_shards
    from vitadel.runtime.distributed import join_processes

    judge = gates.judge()
    processes = join_processes(device)
    outcome = merge_shards(
        runs,
        processes,
        lambda target, request: run_precheck(target, request, processes, show_progress=True),
        device,
        out=out,
        show_progress=True,
    )
    present(outcome, RunFlags(as_json=as_json))
    judge(outcome)
