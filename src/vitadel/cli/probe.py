"""`vitadel probe`: train heads on a model's frozen features by a recipe, and judge the best."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options, running


def probe(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, e.g. probes/shapes, or a .yaml file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. train.steps=500 model.name=deit_small")
    ] = None,
    row: Annotated[str | None, typer.Option(help="which row, for a recipe that is a whole table")] = None,
    tokens: Annotated[Path | None, typer.Option(help="a file of robustness tokens made for the model")] = None,
    allow_readable: Annotated[
        bool, typer.Option("--allow-readable", help="take a file of tokens that others can read, too")
    ] = False,
    data_root: options.DataRoot = None,
    device: options.Device = "auto",
    out: options.Out = None,
    resume: options.Resume = False,
    as_json: options.Json = False,
) -> None:
    """Train heads on frozen features by RECIPE, choose on held-out training images, judge on the test set."""
    from vitadel.defenses.heads.building import build_probe, with_tokens
    from vitadel.defenses.heads.probing import run_probe
    from vitadel.defenses.recipes import compose
    from vitadel.reporting import heads, page
    from vitadel.runtime.processes import join_processes

    title = f"{recipe}:{row}" if row else recipe
    built = build_probe(with_tokens(compose(recipe, row, overrides or ()), tokens), title)
    results, folder = run_probe(
        built,
        title,
        join_processes(device),
        allow_readable=allow_readable,
        out=out,
        resume=resume,
        shown=True,
        tell=heads.tell_plan,
        data_root=data_root,
        argv=sys.argv[1:],
    )
    if "clean" in results:
        page.write_report([folder.path], folder.path / "report.html")
    if as_json:
        running.tell_json(results, folder.path)
        return
    heads.show_heads(results)
    typer.echo(str(folder.path))
