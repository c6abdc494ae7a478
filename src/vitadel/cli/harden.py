"""`vitadel harden`: train or adapt a model by a recipe, then audit it."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import present, run_options, submit_jobs
from vitadel.cli.options import RunFlags, expand_groups


@expand_groups
def harden(
    recipe: Annotated[str, typer.Argument(help="a recipe's name (see 'vitadel list recipes') or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.epochs=3 threat.eps=4/255")
    ] = None,
    row: options.Row = None,
    data_root: options.DataRoot = None,
    launcher: options.Launcher = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Train or adapt a model by RECIPE, then audit it.

    Keeps the weights that are best on held-out images and audits them on the test set.
    """
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.build import build_recipe
    from vitadel.training.recipes.compose import compose
    from vitadel.training.run import run_harden, title_of

    title = title_of(recipe, row)
    built = build_recipe(compose(recipe, row, overrides or ()), title)
    if launcher is not None:
        submit_jobs(launcher, run)
        return
    written = run_options(run, data_root=data_root)
    outcome = run_harden(built, title, join_processes(run.device), data_root=data_root, **written)
    present(outcome, run, report="clean" in outcome.results)
