"""`vitadel ui`: the playground in the browser."""

from __future__ import annotations

import ipaddress
import threading
from contextlib import suppress
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.flag_groups import bundled

_SHAPES = "shapes"


@bundled
def ui(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="models beside those of the zoo, as for 'audit'")
    ] = None,
    data: Annotated[str, typer.Option(help="images to pick by number, and the classes of MODEL if told")] = _SHAPES,
    data_root: options.DataRoot = None,
    host: Annotated[str, typer.Option(help="address to listen on; others than loopback let others in")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 takes any that is free")] = 7860,
    device: options.Device = "auto",
    choice: options.Choice = options.Choice(),
) -> None:
    """Play in the browser: pick a model, an image, an attack, and see what becomes of the answer. Ctrl-C ends it."""
    from vitadel.playground.app import serving
    from vitadel.playground.models import ModelCache
    from vitadel.runtime.distributed import join_processes

    shelf = ModelCache(
        named=models or (),
        data=data,
        device=join_processes(device).device,
        data_root=data_root,
        data_is_told=data != _SHAPES,
        options={
            "model_options": choice.for_loading(),
            "tokens": choice.tokens,
            "allow_readable": choice.allow_readable,
        },
    )
    for spec in models or ():
        shelf.open(spec)  # a mistake in a name is told here, and not in the page
    if not _is_loopback(host):
        typer.echo(
            f"warning: listening on {host}, so everybody who can reach this machine can use its models and time; "
            "there is no password",
            err=True,
        )
    with serving(shelf, host, port) as address:
        typer.echo(f"playground: {address} (Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):  # the way to end it, and no interruption
            threading.Event().wait()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
