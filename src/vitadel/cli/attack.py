"""`vitadel attack`: craft adversarial images and keep them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled


@bundled
def attack(
    model: options.Model = "zoo:shapes-robust",
    sampling: options.Sampling = options.Sampling("shapes"),
    attacking: options.Attacking = options.Attacking("pgd-20"),
    png: Annotated[
        bool, typer.Option("--png", help="also write 8-bit pictures, and judge them again: rounding can undo an attack")
    ] = False,
    conduct: options.Conduct = options.Conduct(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Craft adversarial images for MODEL, judge them, and save those that fool it as safetensors (floats in [0, 1])."""
    from vitadel.reporting import terminal

    request = run_verb.request_of(attacking, sampling, conduct, keep="png" if png else "images")
    done = run_verb.run_attacks("attack", request, model, choice, sampling, run)
    if done is None:
        return

    def show(results: dict[str, Any]) -> None:
        terminal.show_results(results)
        terminal.show_kept(results["kept"])

    run_verb.tell(*done, run, show, report=False)
