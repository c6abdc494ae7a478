"""`vitadel diagnose`: can I trust this number? The doctor's findings with evidence and advice."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli import run_verb
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
    from vitadel.quantities import read_amount
    from vitadel.diagnosis.run import Appointment, visit
    from vitadel.reporting import terminal
    from vitadel.reporting.kinds import diagnosis
    from vitadel.runtime.distributed import join_processes

    plan = Appointment(
        level=level,
        eps=read_amount(threat.eps, "eps"),
        norm=threat.norm,
        surrogate=surrogate,
        **sampling.for_order(),
    )
    processes = join_processes(run.device)
    subject = run_verb.open_chosen(model, choice, sampling)
    terminal.tell_notes(subject.model.record.notes)
    results, folder = visit(
        subject,
        plan,
        processes,
        out=run.out,
        resume=run.resume,
        shown=True,
        argv=sys.argv[1:],
        told=diagnosis.tell_cost,
    )
    run_verb.tell(results, folder.path, run, diagnosis.show_diagnosis)
