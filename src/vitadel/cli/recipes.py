"""`vitadel recipes`: print a recipe, copy it for editing, check that it would run, make a new one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.options import option
from vitadel.errors import UserError

app = typer.Typer(help="Show, copy, check or make recipes.", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="recipes or .yaml files; all shipped ones by default")]
Name = Annotated[str, typer.Argument(help="a recipe's name, e.g. shapes/trades, or a .yaml file of your own")]


@app.command()
def show(
    name: Name,
    row: Annotated[str | None, option("a row of its table, with everything it extends")] = None,
    composed: Annotated[bool, option("with everything it extends", "--composed")] = False,
) -> None:
    """Print a recipe: its file with its comments, or one row."""
    from vitadel.training.recipes.compose import compose, rows, source
    from vitadel.training.recipes.yaml_files import recipe_text

    if row is not None or composed:
        typer.echo(recipe_text(compose(name, row)), nl=False)
        return
    typer.echo(source(name), nl=False)
    if rows(name):
        typer.echo(f"\n# rows: {', '.join(rows(name))}")


@app.command()
def copy(name: Name, target: Annotated[Path, typer.Argument(help="the .yaml file to write")]) -> None:
    """Copy a recipe, with its comments, for editing."""
    from vitadel.training.recipes.compose import source

    _check_ending(target)
    _write_new(target, source(name))


@app.command()
def new(
    target: Annotated[Path, typer.Argument(help="the .yaml file to write")],
    model: Annotated[str, option("MODEL to train, as for audit")],
    data: Annotated[str, option("training data, e.g. folder:photos, with or without train/ and test/ below it")],
    weights: Annotated[str | None, option("weight file to start from; random weights without")] = None,
    objective: Annotated[str, option("trades, adversarial, mart or standard")] = "trades",
    eps: options.Eps = "4/255",
    data_root: options.DataRoot = None,
) -> None:
    """Write a recipe for a model and data of your own."""
    from vitadel.training.recipes.new_recipe import new_recipe

    _check_ending(target)
    if target.exists():
        raise UserError(f"'{target}' already exists and was not changed; choose another name")
    made = new_recipe(model, data, weights=weights, objective=objective, eps=eps, root=data_root)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    _write_new(target, made.text)
    typer.echo(f"next: vitadel harden {shlex.quote(str(target))}", err=True)


def _check_ending(target: Path) -> None:
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"'{target}' does not end in .yaml, as recipe files must; try {target}.yaml")


def _write_new(target: Path, text: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"'{target}' already exists and was not changed; choose another name") from None
    except OSError as error:
        raise UserError(f"'{target}' cannot be written: {error}") from error
    typer.echo(str(target))


@app.command()
def check(names: Names = None) -> None:
    """Build every row of the recipes, without training, and report all errors."""
    from vitadel.heads.probe_recipe import check_probe
    from vitadel.training.recipes.check import check_recipe, recipe_warnings
    from vitadel.training.recipes.compose import rows
    from vitadel.training.recipes.yaml_files import shipped_recipes

    faults = []
    for name in names or shipped_recipes():
        fault = check_recipe(name, check_probe)
        if fault is not None:
            faults.append(fault)
            continue
        count = len(rows(name))
        typer.echo(f"{name}: good{f', {count} rows' if count else ''}")
        for warning in recipe_warnings(name):
            typer.echo(f"warning: {warning}", err=True)
    if faults:
        raise UserError("\n".join(faults))
