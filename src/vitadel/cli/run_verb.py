"""What verbs have in common: open model and data, run attacks, and tell what came of it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vitadel.cli.options import Attacking, Choice, Conduct, Running, Sampling

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.evaluation.engine.run import Outcome
    from vitadel.evaluation.engine.target import Target

__all__ = ["open_chosen", "request_of", "run_attacks", "tell", "tell_outcome"]


def open_chosen(model: str, choice: Choice, sampling: Sampling, *, for_features: bool = False) -> Target:
    """Model and data as the flags name them; `for_features` asks for no head where a backbone has none."""
    from vitadel.adapters.adapted_model import options_for_features
    from vitadel.evaluation.engine.target import open_target

    chosen = choice.for_loading()
    return open_target(
        model,
        sampling.data,
        data_root=sampling.data_root,
        model_options=options_for_features(model, chosen) if for_features else chosen,
        skip_bad=sampling.skip_bad,
        tokens=choice.tokens,
        allow_readable=choice.allow_readable,
    )


def request_of(attacking: Attacking, sampling: Sampling, conduct: Conduct = Conduct(), **more: Any) -> AuditRequest:
    """What an audit is asked to do by its flags."""
    from vitadel.attacks.parse import split_attack_list
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.quantities import read_quantity

    return AuditRequest(
        attacks=tuple(split_attack_list(attacking.attacks)),
        eps=read_quantity(attacking.eps, "eps"),
        norm=attacking.norm,
        precision=conduct.precision,
        calibration=conduct.calibration,
        compile=attacking.compile_model,
        **more,
        **sampling.for_request(),
    )


def run_attacks(
    verb: str,
    request: AuditRequest,
    model: str,
    choice: Choice,
    sampling: Sampling,
    running: Running,
    *,
    doctor: bool = False,
    unsaid: Sequence[str] = (),
) -> tuple[dict[str, Any], Path] | None:
    """The results and their folder; None in a process of the run that is not the one to tell.

    With `doctor` the model is looked at before it is attacked. `unsaid` are flags that a protocol stands for: they are
    kept with the command, so that studies and further commands open the same model.
    """
    from vitadel.diagnosis.precheck import run_precheck
    from vitadel.evaluation.audit.audit import run_audit
    from vitadel.reporting import terminal
    from vitadel.runtime.distributed import join_processes

    processes = join_processes(running.device)
    target = open_chosen(model, choice, sampling)
    if processes.is_main:
        terminal.tell_notes(target.model.record.notes)
    outcome = run_audit(
        target,
        request,
        processes,
        out=running.out,
        resume=running.resume,
        show_progress=True,
        argv=[*sys.argv[1:], *unsaid],
        verb=verb,
        examine=(lambda opened: run_precheck(opened, request, processes)) if doctor else (lambda opened: []),
    )
    if not outcome.is_main or outcome.folder is None:
        return None
    return outcome.results, outcome.folder.path


def tell_outcome(
    outcome: Outcome, running: Running, show: Callable[[dict[str, Any]], None], *, report: bool = True
) -> None:
    """`tell`, in the main process only."""
    if outcome.is_main and outcome.folder is not None:
        tell(outcome.results, outcome.folder.path, running, show, report=report)


def tell(
    results: dict[str, Any],
    folder: Path,
    running: Running,
    show: Callable[[dict[str, Any]], None],
    *,
    report: bool = True,
) -> None:
    """Write the report; then JSON alone on standard output for other programs, or words and the folder's path."""
    if report:
        from vitadel.reporting import page

        try:
            page.write_report([folder], folder / "report.html")
        except KeyboardInterrupt:
            again = shlex.join(["vitadel", "report", str(folder)])
            typer.echo(f"vitadel: interrupted; the results are saved. Make the page with:\n  {again}", err=True)
            raise
    if running.as_json:
        typer.echo(json.dumps(results, indent=2))
        typer.echo(str(folder), err=True)
        return
    show(results)
    if report:
        typer.echo(f"report: {folder / 'report.html'}")
    typer.echo(str(folder))
