"""`vitadel probe`: train heads on a model's frozen features by a recipe, and evaluate the best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import present, run_options
from vitadel.cli.options import RunFlags, expand_groups, option


@expand_groups
def probe(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, e.g. probes/shapes, or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.steps=500 model.name=deit_small")
    ] = None,
    row: options.Row = None,
    tokens: Annotated[Path | None, option("file of robustness tokens for the model")] = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    run: RunFlags = RunFlags(),
) -> None:
    """Train heads on frozen features by RECIPE.

    Selects the head on held-out training images and evaluates it on the test set.
    """
    from vitadel.heads.probe import run_probe
    from vitadel.heads.probe_recipe import build_probe, with_tokens
    from vitadel.reporting.kinds.probe import show_probe_plan
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.compose import compose
    from vitadel.training.run import title_of

    title = title_of(recipe, row)
    built = build_probe(with_tokens(compose(recipe, row, overrides or ()), tokens), title)
    outcome = run_probe(
        built,
        title,
        join_processes(run.device),
        allow_readable=allow_readable,
        show_plan=show_probe_plan,
        data_root=data_root,
        **run_options(run, data_root=data_root, tokens=tokens, allow_readable=allow_readable),
    )
    present(outcome, run, report="clean" in outcome.results)
