"""`vitadel inspect`: massive activations layer by layer, clean and attacked, without and with robustness tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from vitadel.cli import options, running


def inspect(
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    tokens: options.Tokens = None,
    allow_readable: options.AllowReadable = False,
    attack: Annotated[
        str, typer.Option(help="one attack, e.g. features-30; see 'vitadel list attacks'")
    ] = "features-30",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = 100,
    batch_size: options.BatchSize = 32,
    seed: options.Seed = 0,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_size: options.InputSize = None,
    small_images: options.SmallImages = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Where does MODEL have its largest activations, and what do attacks and tokens make of them?"""
    from vitadel.adapters.opening import options_for_features
    from vitadel.adapters.robustness_tokens import Tokened
    from vitadel.amounts import read_amount
    from vitadel.evaluation.activations import Look, inspect_activations
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting import page, terminal
    from vitadel.runtime.processes import join_processes

    look = Look(attack, read_amount(eps, "eps"), norm, limit, batch_size, seed, skip_bad)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    chosen = options_for_features(model, chosen)
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
    opened: object = subject.model
    tokened = opened if isinstance(opened, Tokened) else None
    if tokened is not None:
        subject = replace(subject, model=tokened.classifier)
    results, folder = inspect_activations(
        subject, tokened, look, processes, out=out, resume=resume, shown=True, argv=sys.argv[1:]
    )
    page.write_report([folder.path], folder.path / "report.html")
    if as_json:
        running.tell_json(results, folder.path)
        return
    terminal.show_activations(results)
    typer.echo(f"report: {folder.path / 'report.html'}")
    typer.echo(str(folder.path))
