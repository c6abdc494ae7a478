"""`vitadel plan`: what an audit will cost, before it runs."""

from __future__ import annotations

import json

import typer

from vitadel.cli import options


def plan(
    model: options.Model = "zoo:shapes-robust",
    data: options.Data = "shapes",
    attacks: options.Attacks = "fgsm,pgd-20",
    eps: options.Eps = "8/255",
    norm: options.Norm = "linf",
    limit: options.Limit = None,
    batch_size: options.BatchSize = 64,
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
    compile_model: options.Compile = False,
    as_json: options.Json = False,
) -> None:
    """Passes, memory and time of an audit on this machine, measured by a short probe."""
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order
    from vitadel.evaluation.plan import plan as estimate
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting.terminal import show_plan
    from vitadel.runtime.processes import join_processes

    order = Order(tuple(split_attack_list(attacks)), read_amount(eps, "eps"), norm, limit, batch_size, seed)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    subject = open_subject(model, data, data_root=data_root, model_options=chosen, skip_bad=skip_bad)
    cost = estimate(
        subject,
        attacks=order.attacks,
        eps=order.eps,
        norm=order.norm,
        samples=len(subject.selection(limit, seed, skip_bad)[0]),
        batch_size=order.batch_size,
        device=join_processes(device).device,
        compile_model=compile_model,
    )
    if as_json:
        typer.echo(json.dumps(cost, indent=2))
    else:
        show_plan(cost)
