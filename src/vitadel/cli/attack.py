"""`vitadel attack`: craft adversarial images and keep them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options


def attack(
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    attacks: options.Attacks = "pgd-20",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = None,
    batch_size: options.BatchSize = 64,
    seed: options.Seed = 0,
    png: Annotated[
        bool, typer.Option("--png", help="also write 8-bit pictures, and judge them again: rounding can undo an attack")
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
    """Craft adversarial images for MODEL, judge them, and save those that fool it as safetensors (floats in [0, 1])."""
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order, run_audit
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting import terminal
    from vitadel.runtime.processes import join_processes

    order = Order(
        tuple(split_attack_list(attacks)),
        read_amount(eps, "eps"),
        norm,
        limit,
        batch_size,
        seed,
        precision=precision,
        skip_bad=skip_bad,
        calibration=calibration,
        compile=compile_model,
        keep="png" if png else "images",
    )
    processes = join_processes(device)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    subject = open_subject(model, data, data_root=data_root, model_options=chosen, skip_bad=skip_bad)
    outcome = run_audit(
        subject, order, processes, out=out, in_folder=True, resume=resume, shown=True, argv=sys.argv[1:], verb="attack"
    )
    if not outcome.is_main or outcome.folder is None:
        return
    folder = outcome.folder.path
    if as_json:
        typer.echo(json.dumps(outcome.results, indent=2))
        typer.echo(str(folder), err=True)
        return
    terminal.show_results(outcome.results)
    terminal.show_kept(outcome.results["kept"])
    typer.echo(str(folder))
