"""`vitadel plan`: what an audit or a training will cost, before it runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import audit_request, open_target
from vitadel.cli.options import (
    AttackFlags,
    ClassifierFlags,
    DataFlags,
    expand_groups,
    flag_names,
    given_flags,
    spell_flag,
)
from vitadel.errors import UserError, nearest_names


@expand_groups
def plan(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="a MODEL as for audit, or a recipe as for harden")] = "zoo:shapes-robust",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for a recipe, e.g. train.epochs=3")
    ] = None,
    row: options.Row = None,
    attacks: AttackFlags = AttackFlags("autoattack-fast"),
    data: DataFlags = DataFlags("shapes"),
    how: ClassifierFlags = ClassifierFlags(),
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Estimate passes, memory and time of an audit or training.

    Times come from a short measurement on this machine.
    """
    from vitadel.training.recipes.yaml_files import shipped_recipes

    shipped = shipped_recipes()
    if model in shipped or model.endswith((".yaml", ".yml")):
        of_audits = {flag for group in (DataFlags, AttackFlags, ClassifierFlags) for flag in flag_names(group)}
        odd = [spell_flag(name) for name in ctx.params if name in of_audits & given_flags(ctx) - {"data_root"}]
        if odd:
            raise UserError(
                f"{', '.join(odd)}: a recipe sets these itself; write KEY=VALUE instead, e.g. threat.eps=4/255 "
                "audit.limit=100 audit.attacks=[pgd-20]"
            )
        _plan_training(model, row, overrides or [], data.data_root, device, as_json)
        return
    _refuse_mistyped_recipe(model, shipped)
    if overrides or row:
        raise UserError(f"KEY=VALUE and --row belong to a recipe, and '{model}' is none; see 'vitadel list recipes'")
    from vitadel.diagnosis.precheck import GRADIENTS, IMAGES
    from vitadel.evaluation.audit.audit_plan import plan_audit
    from vitadel.reporting.terminal import show_plan

    request = audit_request(attacks, data)
    processes, target = open_target(model, how, data, device)
    typer.echo("plan: measuring passes, then trying the attacks on a few images ...", err=True)
    cost = plan_audit(target, request, processes, checks=(IMAGES, GRADIENTS))
    if as_json:
        typer.echo(json.dumps(cost, indent=2))
    else:
        show_plan(cost)


def _refuse_mistyped_recipe(name: str, shipped: list[str]) -> None:
    """Refuse what looks like a recipe's name, or is one without its folder, but is no file."""
    if ":" in name or Path(os.path.expanduser(name)).exists():
        return
    alike = [recipe for recipe in shipped if recipe.endswith(f"/{name}")]
    near = nearest_names(name, shipped) if "/" in name else f"; did you mean {', '.join(alike)}?" if alike else ""
    if near:
        raise UserError(f"'{name}' is no recipe, and no file or folder{near} See 'vitadel list recipes'.")


def _plan_training(
    name: str, row: str | None, overrides: list[str], data_root: Path | None, device: str, as_json: bool
) -> None:
    from vitadel.reporting.terminal import show_training_plan
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.build import build_recipe
    from vitadel.training.recipes.compose import compose
    from vitadel.training.run import open_training, title_of
    from vitadel.training.training_cost import plan_training

    title = title_of(name, row)
    processes = join_processes(device)
    setup = open_training(build_recipe(compose(name, row, overrides), title), processes, data_root)
    cost = plan_training(setup, processes, lambda part: typer.echo(f"plan: measuring {part} ...", err=True))
    if as_json:
        typer.echo(json.dumps(cost, indent=2))
    else:
        show_training_plan(title, cost)
