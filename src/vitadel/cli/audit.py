"""`vitadel audit`: clean accuracy, attacks, worst case; a run folder and a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options


def audit(
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    attacks: options.Attacks = "fgsm,pgd-20",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = None,
    batch_size: options.BatchSize = 64,
    seed: options.Seed = 0,
    independent: Annotated[
        bool, typer.Option("--independent", help="every attack sees all correct samples, not only those still standing")
    ] = False,
    calibration: options.Calibration = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_size: options.InputSize = None,
    small_images: options.SmallImages = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    compile_model: options.Compile = False,
    out: Annotated[Path | None, typer.Option(help="run folder; by default a new one below runs/")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished run")] = False,
    as_json: options.Json = False,
) -> None:
    """How accurate is MODEL, and how much of that survives an attack? Writes a run folder and a report."""
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order, run_audit
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting import page, terminal
    from vitadel.runtime.processes import join_processes

    names = tuple(split_attack_list(attacks))
    order = Order(
        names,
        read_amount(eps, "eps"),
        norm,
        limit,
        batch_size,
        seed,
        independent,
        precision,
        skip_bad,
        calibration,
        compile_model,
    )
    processes = join_processes(device)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    subject = open_subject(model, data, data_root=data_root, model_options=chosen, skip_bad=skip_bad)
    if processes.is_main:
        terminal.tell_notes(subject.model.record.notes)
    outcome = run_audit(
        subject, order, processes, out=out, in_folder=True, resume=resume, shown=True, argv=sys.argv[1:]
    )
    if not outcome.is_main or outcome.folder is None:
        return  # another process of the same run writes and tells
    folder = outcome.folder.path
    page.write_report([folder], folder / "report.html")
    if as_json:
        typer.echo(json.dumps(outcome.results, indent=2))
        typer.echo(str(folder), err=True)
        return
    terminal.show_results(outcome.results)
    typer.echo(f"report: {folder / 'report.html'}")
    typer.echo(str(folder))
