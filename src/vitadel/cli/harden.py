"""`vitadel harden`: train or adapt a model by a recipe, then audit it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled


@bundled
def harden(
    recipe: Annotated[str, typer.Argument(help="a recipe's name (see 'vitadel list recipes') or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.epochs=3 threat.eps=4/255")
    ] = None,
    row: options.Row = None,
    data_root: options.DataRoot = None,
    run: options.Running = options.Running(),
) -> None:
    """Train by RECIPE, keep the best weights on held-out images, and audit them on the test set."""
    from vitadel.reporting import terminal
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.build import build_recipe
    from vitadel.training.recipes.documents import compose
    from vitadel.training.run import run_harden, title_of

    title = title_of(recipe, row)
    built = build_recipe(compose(recipe, row, overrides or ()), title)
    processes = join_processes(run.device)
    outcome = run_harden(
        built,
        title,
        processes,
        out=run.out,
        resume=run.resume,
        show_progress=True,
        data_root=data_root,
        argv=sys.argv[1:],
    )
    run_verb.tell_outcome(outcome, run, terminal.show_training, report="clean" in outcome.results)
