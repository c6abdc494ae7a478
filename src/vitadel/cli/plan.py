"""`vitadel plan`: what an audit or a training will cost, before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.errors import Mistake


def plan(
    model: Annotated[str, typer.Argument(help="a MODEL as for audit, or a recipe as for harden")] = "zoo:shapes-robust",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for a recipe, e.g. train.epochs=3")
    ] = None,
    row: Annotated[str | None, typer.Option(help="for a recipe that is a whole table")] = None,
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
    tokens: options.Tokens = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    skip_bad: options.SkipBad = False,
    device: options.Device = "auto",
    compile_model: options.Compile = False,
    as_json: options.Json = False,
) -> None:
    """Passes, memory and time of an audit, or of a training by a recipe, on this machine, measured by a short probe."""
    from vitadel.defenses.recipes import shipped_recipes

    if model in shipped_recipes() or model.endswith((".yaml", ".yml")):
        _plan_training(model, row, overrides or [], data_root, device, as_json)
        return
    if overrides or row:
        raise Mistake(f"KEY=VALUE and --row belong to a recipe, and '{model}' is none; see 'vitadel list recipes'")
    from vitadel.amounts import read_amount
    from vitadel.attacks.names import split_attack_list
    from vitadel.evaluation.audit import Order
    from vitadel.evaluation.plan import plan as estimate
    from vitadel.evaluation.subject import open_subject
    from vitadel.reporting.terminal import show_plan
    from vitadel.runtime.processes import join_processes

    order = Order(tuple(split_attack_list(attacks)), read_amount(eps, "eps"), norm, limit, batch_size, seed)
    chosen = options.model_options(weights, num_classes, mean, std, input_size, small_images)
    subject = open_subject(
        model,
        data,
        data_root=data_root,
        model_options=chosen,
        skip_bad=skip_bad,
        tokens=tokens,
        allow_readable=allow_readable,
    )
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


def _plan_training(
    name: str, row: str | None, overrides: list[str], data_root: Path | None, device: str, as_json: bool
) -> None:
    from vitadel.defenses.building import build_recipe
    from vitadel.defenses.harden import open_workshop, title_of
    from vitadel.defenses.planning import plan_training
    from vitadel.defenses.recipes import compose
    from vitadel.reporting.terminal import show_training_plan
    from vitadel.runtime.processes import join_processes

    title = title_of(name, row)
    processes = join_processes(device)
    shop = open_workshop(build_recipe(compose(name, row, overrides), title), processes, data_root)
    cost = plan_training(shop, processes)
    if as_json:
        typer.echo(json.dumps(cost, indent=2))
    else:
        show_training_plan(title, cost)
