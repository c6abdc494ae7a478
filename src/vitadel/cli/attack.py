"""`vitadel attack`: craft adversarial images and keep them."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import options, running


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
    tokens: options.Tokens = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    precision: options.Precision = "fp32",
    compile_model: options.Compile = False,
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Craft adversarial images for MODEL, judge them, and save those that fool it as safetensors (floats in [0, 1])."""
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order
    from vitadel.reporting import terminal

    order = Order(
        attacks=tuple(split_attack_list(attacks)),
        eps=read_amount(eps, "eps"),
        norm=norm,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        precision=precision,
        skip_bad=skip_bad,
        calibration=calibration,
        compile=compile_model,
        keep="png" if png else "images",
    )
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    done = running.run(
        "attack",
        order,
        model,
        data,
        data_root=data_root,
        model_options=chosen,
        device=device,
        out=out,
        resume=resume,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    if done is None:
        return
    results, folder = done
    if as_json:
        running.tell_json(results, folder)
        return
    terminal.show_results(results)
    terminal.show_kept(results["kept"])
    typer.echo(str(folder))
