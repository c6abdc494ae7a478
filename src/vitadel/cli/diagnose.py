"""`vitadel diagnose`: can I trust this number? The doctor's findings with evidence and advice."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options, running


def diagnose(
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    level: Annotated[str, typer.Option(help="quick (64 images) or thorough (256, stronger attacks)")] = "quick",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = None,
    surrogate: Annotated[
        str | None, typer.Option(help="a MODEL to transfer attacks from; else a student of the answers is trained")
    ] = None,
    batch_size: options.BatchSize = 64,
    seed: options.Seed = 0,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_size: options.InputSize = None,
    small_images: options.SmallImages = False,
    tokens: options.Tokens = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Can robustness numbers of MODEL be trusted? Checks for masked gradients, weak attacks and plain accidents."""
    from vitadel.amounts import read_amount
    from vitadel.diagnosis.visit import Appointment, visit
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting import diagnosis, page, terminal
    from vitadel.runtime.processes import join_processes

    plan = Appointment(level, read_amount(eps, "eps"), norm, limit, batch_size, seed, skip_bad, surrogate)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    processes = join_processes(device)
    subject = open_subject(
        model,
        data,
        data_root=data_root,
        model_options=chosen,
        skip_bad=skip_bad,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    terminal.tell_notes(subject.model.record.notes)
    results, folder = visit(
        subject,
        plan,
        processes,
        out=out,
        resume=resume,
        shown=True,
        argv=sys.argv[1:],
        told=diagnosis.tell_cost,
    )
    page.write_report([folder.path], folder.path / "report.html")
    if as_json:
        running.tell_json(results, folder.path)
        return
    diagnosis.show_diagnosis(results)
    typer.echo(f"report: {folder.path / 'report.html'}")
    typer.echo(str(folder.path))
