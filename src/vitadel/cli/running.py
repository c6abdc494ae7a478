"""What `audit` and `attack` have in common: open model and data, run, and leave to the verb only what it tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from vitadel.evaluation.audit import Order

__all__ = ["run", "tell_json"]


def run(
    verb: str,
    order: Order,
    model: str,
    data: str,
    *,
    data_root: Path | None,
    model_options: Mapping[str, Any],
    device: str,
    out: Path | None,
    resume: bool,
    tokens: str | None = None,
    allow_readable: bool = False,
) -> tuple[dict[str, Any], Path] | None:
    """The results and their folder; None in a process of the run that is not the one to tell."""
    from vitadel.evaluation.audit import run_audit
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting import terminal
    from vitadel.runtime.processes import join_processes

    processes = join_processes(device)
    subject = open_subject(
        model,
        data,
        data_root=data_root,
        model_options=model_options,
        skip_bad=order.skip_bad,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    if processes.is_main:
        terminal.tell_notes(subject.model.record.notes)
    outcome = run_audit(
        subject, order, processes, out=out, in_folder=True, resume=resume, shown=True, argv=sys.argv[1:], verb=verb
    )
    if not outcome.is_main or outcome.folder is None:
        return None
    return outcome.results, outcome.folder.path


def tell_json(results: dict[str, Any], folder: Path) -> None:
    """Results alone on standard output, for other programs."""
    typer.echo(json.dumps(results, indent=2))
    typer.echo(str(folder), err=True)
