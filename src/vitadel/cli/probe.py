"""`vitadel probe`: train heads on a model's frozen features by a recipe, and judge the best."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options, running
from vitadel.cli.bundles import bundled


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
    from vitadel.defenses.harden import title_of
    from vitadel.defenses.heads.building import build_probe, with_tokens
    from vitadel.defenses.heads.probing import run_probe
    from vitadel.defenses.recipes import compose
    from vitadel.reporting import heads
    from vitadel.runtime.processes import join_processes

    title = title_of(recipe, row)
    built = build_probe(with_tokens(compose(recipe, row, overrides or ()), tokens), title)
    results, folder = run_probe(
        built,
        title,
        join_processes(run.device),
        allow_readable=allow_readable,
        out=run.out,
        resume=run.resume,
        shown=True,
        tell=heads.tell_plan,
        data_root=data_root,
        argv=sys.argv[1:],
    )
    running.tell(results, folder.path, run, heads.show_heads, report="clean" in results)
