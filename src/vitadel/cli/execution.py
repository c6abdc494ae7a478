"""What the verbs share: open the model and the data that the flags name, run attacks, write the report, print."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from vitadel.cli.options import AttackFlags, DataFlags, ModelFlags, RunFlags
from vitadel.errors import UserError

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.evaluation.engine.run import Outcome, RunOptions
    from vitadel.evaluation.engine.target import Target
    from vitadel.runtime.distributed import Processes


def open_target(
    model: str, how: ModelFlags, data: DataFlags, device: str, *, for_features: bool = False, notes: bool = False
) -> tuple[Processes, Target]:
    """Join the other processes, and open model and data as the flags say.

    `for_features` asks for no head where a backbone has none. What had to be assumed about the model is shown; with
    `notes` also how its file was read.
    """
    from vitadel.evaluation.engine.target import open_as
    from vitadel.runtime.distributed import join_processes
    from vitadel.runtime.opening import Opening

    processes = join_processes(device)
    opening = Opening.read(model=model, device=device, **asdict(how), **asdict(data))
    target = open_as(opening, for_features=for_features)
    if processes.is_main:
        record, mapping = target.model.record, target.mapping
        stated = {} if mapping is None or not mapping.changes_labels else {"classes": mapping.sentence(target.among)}
        show_notes({**(record.notes if notes else record.assumptions), **stated})
    return processes, target


def run_options(run: RunFlags, **opened: Any) -> RunOptions:
    """Return where the run is written and how it is shown, as the run engine takes it.

    `opened` are the flags that opened something, of verbs that do not open a model and its data by `open_target`.
    """
    from vitadel.runtime.opening import Opening

    opening = Opening.read(device=run.device, **opened) if opened else None
    return {"out": run.out, "resume": run.resume, "show_progress": True, "argv": sys.argv[1:], "opening": opening}


def audit_request(attacks: AttackFlags, data: DataFlags, **more: Any) -> AuditRequest:
    """Return the request that the flags describe; `more` are further fields of it."""
    from vitadel.attacks.parse import split_attack_list, without_escalation
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.quantities import read_quantity

    names = split_attack_list(attacks.attacks)
    return AuditRequest(
        attacks=tuple(names if attacks.escalate else without_escalation(names)),
        eps=read_quantity(attacks.eps, "eps"),
        norm=attacks.norm,
        compile=attacks.compile_model,
        **more,
        **data.for_request(),
    )


def run_attacks(
    verb: str,
    requests: Sequence[AuditRequest],
    model: str,
    how: ModelFlags,
    data: DataFlags,
    run: RunFlags,
    *,
    precheck: bool = False,
    workers: int | None = None,
) -> Outcome:
    """Open the model and attack it; with `precheck`, the fast checks of `diagnose` come first.

    Several requests are about the union of their threats.
    """
    from vitadel.evaluation.audit.audit import run_audits

    processes, target = open_target(model, how, data, run.device, notes=True)
    checks: dict[str, Any] = {}
    if precheck:
        from vitadel.diagnosis.precheck import run_precheck

        checks["examine"] = lambda opened: run_precheck(opened, requests[0], processes, show_progress=True)
    return run_audits(target, requests, processes, verb=verb, workers=workers, **checks, **run_options(run))


def show_notes(notes: Mapping[str, str]) -> None:
    """Print what loading the model found worth mentioning, on standard error."""
    for what, note in notes.items():
        if what != "about":
            typer.echo(f"{typer.style(f'{what}:', fg='yellow')} {note}", err=True)


def present(outcome: Outcome, run: RunFlags, *, report: bool = True) -> None:
    """Write the report, then print the results and the folder's path, or JSON alone for other programs.

    Only the main process does so.
    """
    if not outcome.is_main or outcome.folder is None:
        return
    from vitadel.reporting import page, terminal

    folder = outcome.folder.path
    if report:
        try:
            page.write_report([folder], folder / "report.html")
        except KeyboardInterrupt:
            again = shlex.join(["vitadel", "report", str(folder)])
            typer.echo(f"vitadel: interrupted; the results are saved. Write the report with:\n  {again}", err=True)
            raise
    if run.as_json:
        typer.echo(json.dumps(outcome.results, indent=2))
        typer.echo(str(folder), err=True)
        return
    terminal.show_run(folder)
    if report:
        typer.echo(f"report: {folder / 'report.html'}")
    typer.echo(str(folder))


def submit_jobs(launcher: str, run: RunFlags, *, shards: bool = False) -> None:
    """Submit this command as jobs of a cluster; a verb without `shards` is one job."""
    from vitadel.runtime.launcher import launch, read_launcher
    from vitadel.runtime.run_shards import without_flags

    wanted = read_launcher(launcher)
    if run.out is None:
        raise UserError("--launcher needs --out: the folder in which the jobs work, on a disk that they share")
    if wanted.shards is not None and not shards:
        raise UserError("--launcher: only an audit has shards; leave out shards=... here")
    words = without_flags(sys.argv[1:], "--launcher")
    jobs = launch(wanted, words if wanted.shards is not None else [*words, "--resume"], run.out)
    typer.echo(f"submitted {len(jobs)} job{'s' * (len(jobs) > 1)}: {', '.join(jobs)}", err=True)
    if wanted.shards is not None:
        typer.echo(f"when all are done: {shlex.join(['vitadel', 'merge', str(run.out)])}", err=True)
    typer.echo(str(run.out))
