"""`vitadel diagnose`: check whether robustness numbers can be trusted; findings with evidence and advice."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import open_target, present, run_options, show_notes
from vitadel.cli.options import DataFlags, ModelFlags, RunFlags, ThreatFlags, expand_groups


@expand_groups
def diagnose(
    model: options.Model = "zoo:shapes-robust",
    level: Annotated[str, typer.Option(help="quick (48 images) or thorough (256, stronger attacks)")] = "quick",
    surrogate: Annotated[
        str | None, typer.Option(help="MODEL to transfer attacks from (default: a student trained here)")
    ] = None,
    threat: ThreatFlags = ThreatFlags(),
    data: DataFlags = DataFlags("shapes"),
    how: ModelFlags = ModelFlags(),
    run: RunFlags = RunFlags(),
) -> None:
    """Check whether robustness numbers of MODEL can be trusted.

    Looks for masked gradients, weak attacks and setup errors.
    """
    from vitadel.diagnosis.run import DiagnosisRequest, run_diagnosis
    from vitadel.quantities import read_quantity
    from vitadel.reporting.kinds.diagnosis import show_cost
    from vitadel.runtime.distributed import join_processes

    request = DiagnosisRequest(
        level=level,
        eps=read_quantity(threat.eps, "eps"),
        norm=threat.norm,
        surrogate=surrogate,
        **data.for_request(),
    )
    processes = join_processes(run.device)
    target = open_target(model, how, data, device=run.device)
    show_notes(target.model.record.notes)
    outcome = run_diagnosis(target, request, processes, show_cost=show_cost, **run_options(run))
    present(outcome, run)
