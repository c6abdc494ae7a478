"""`vitadel diagnose`: can I trust this number? The doctor's findings with evidence and advice."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled


@bundled
def diagnose(
    model: options.Model = "zoo:shapes-robust",
    sampling: options.Sampling = options.Sampling("shapes"),
    level: Annotated[str, typer.Option(help="quick (48 images) or thorough (256, stronger attacks)")] = "quick",
    surrogate: Annotated[
        str | None, typer.Option(help="a MODEL to transfer attacks from; else a student of the answers is trained")
    ] = None,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Can robustness numbers of MODEL be trusted? Checks for masked gradients, weak attacks and plain accidents."""
    from vitadel.diagnosis.run import DiagnosisRequest, run_diagnosis
    from vitadel.quantities import read_quantity
    from vitadel.reporting import terminal
    from vitadel.reporting.kinds import diagnosis
    from vitadel.runtime.distributed import join_processes

    plan = DiagnosisRequest(
        level=level,
        eps=read_quantity(threat.eps, "eps"),
        norm=threat.norm,
        surrogate=surrogate,
        **sampling.for_request(),
    )
    processes = join_processes(run.device)
    target = run_verb.open_chosen(model, choice, sampling)
    terminal.tell_notes(target.model.record.notes)
    outcome = run_diagnosis(
        target,
        plan,
        processes,
        out=run.out,
        resume=run.resume,
        show_progress=True,
        argv=sys.argv[1:],
        show_cost=diagnosis.tell_cost,
    )
    run_verb.tell_outcome(outcome, run, diagnosis.show_diagnosis)
