"""`vitadel ui`: the playground in the browser."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.options import ModelFlags, expand_groups, option

_SHAPES = "shapes"


@expand_groups
def ui(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="models in addition to the zoo, as for 'audit'")
    ] = None,
    data: Annotated[str, option("images to choose from; also names the classes of MODEL")] = _SHAPES,
    data_root: options.DataRoot = None,
    host: Annotated[str, option("address to listen on; only loopback is private")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0 for any free one")] = 7860,
    device: options.Device = "auto",
    how: ModelFlags = ModelFlags(),
) -> None:
    """Attack images in the browser (Ctrl-C ends it)."""
    from vitadel.playground.access import is_loopback
    from vitadel.playground.app import serve
    from vitadel.playground.models import ModelCache
    from vitadel.runtime.distributed import join_processes
    from vitadel.runtime.opening import Opening

    cache = ModelCache(
        named=models or (),
        data=data,
        device=join_processes(device).device,
        data_root=data_root,
        data_is_named=data != _SHAPES,
        options={
            "model_options": Opening.read(**asdict(how)).model_options(),
            "tokens": how.tokens,
            "allow_readable": how.allow_readable,
        },
    )
    _ = cache.source  # wrong names of data and models are reported here, not in the page
    for spec in models or ():
        cache.open(spec)
    if not is_loopback(host):
        typer.echo(
            f"warning: listening on {host} without a password: everybody who can reach this machine can use its models",
            err=True,
        )
    with serve(cache, host, port) as address:
        typer.echo(f"playground: {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):  # Ctrl-C is the normal end here
            threading.Event().wait()
