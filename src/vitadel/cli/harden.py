"""`vitadel harden`: train or adapt a model by a recipe, then audit it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options, running


def harden(
    recipe: Annotated[str, typer.Argument(help="a recipe's name (see 'vitadel list recipes') or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.epochs=3 threat.eps=4/255")
    ] = None,
    row: Annotated[str | None, typer.Option(help="which row, for a recipe that is a whole table")] = None,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train by RECIPE, keep the best weights on held-out images, and audit them on the test set."""
    from vitadel.defenses.building import build_recipe
    from vitadel.defenses.harden import run_harden, title_of
    from vitadel.defenses.recipes import compose
    from vitadel.reporting import page, terminal
    from vitadel.runtime.processes import join_processes

    title = title_of(recipe, row)
    built = build_recipe(compose(recipe, row, overrides or ()), title)
    processes = join_processes(device)
    results, folder = run_harden(
        built, title, processes, out=out, resume=resume, shown=True, data_root=data_root, argv=sys.argv[1:]
    )
    if not processes.is_main:
        return
    if "clean" in results:
        page.write_report([folder.path], folder.path / "report.html")
    if as_json:
        running.tell_json(results, folder.path)
        return
    terminal.show_training(results)
    typer.echo(str(folder.path))
