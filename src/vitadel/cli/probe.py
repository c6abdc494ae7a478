"""`vitadel probe`: train heads on a model's frozen features by a recipe, and judge the best."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled


@bundled
def probe(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, e.g. probes/shapes, or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.steps=500 model.name=deit_small")
    ] = None,
    row: options.Row = None,
    tokens: Annotated[Path | None, typer.Option(help="a file of robustness tokens made for the model")] = None,
    allow_readable: options.AllowReadable = False,
    data_root: options.DataRoot = None,
    run: options.Running = options.Running(),
) -> None:
    """Train heads on frozen features by RECIPE, choose on held-out training images, judge on the test set."""
    from vitadel.heads.probe import run_probe
    from vitadel.heads.probe_recipe import build_probe, with_tokens
    from vitadel.reporting.kinds import probe as heads
    from vitadel.runtime.distributed import join_processes
    from vitadel.training.recipes.documents import compose
    from vitadel.training.run import title_of

    title = title_of(recipe, row)
    built = build_probe(with_tokens(compose(recipe, row, overrides or ()), tokens), title)
    outcome = run_probe(
        built,
        title,
        join_processes(run.device),
        allow_readable=allow_readable,
        out=run.out,
        resume=run.resume,
        show_progress=True,
        show_plan=heads.tell_plan,
        data_root=data_root,
        argv=sys.argv[1:],
    )
    run_verb.tell_outcome(outcome, run, heads.show_heads, report="clean" in outcome.results)
