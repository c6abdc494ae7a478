"""`vitadel study NAME RUN-OR-MODEL`: the papers' analyses on a model of the user's."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import options, study_pictures
from vitadel.cli.flag_groups import bundled
from vitadel.cli.run_or_model import IMAGES, Calibration, Opening, RunOrModel, conduct
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

_Images = Annotated[int, typer.Option(help="calibration images on which aas finds its factors")]
_Attack = Annotated[str, typer.Option(help="one plain attack, e.g. pgd-20; see 'vitadel list attacks'")]

app = typer.Typer(help="Analyses of the papers, on your model or on the run folder of an audit.", no_args_is_help=True)


@app.command()
@bundled
def curves(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: Annotated[str, typer.Option(help="one attack, without K: pgd, cw, aas+pgd, 'pgd(step=1/255)'")] = "pgd",
    budgets: Annotated[
        str | None, typer.Option(help="of the first curve, e.g. 0,4/255,8/255; by default 0 to twice --eps")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="of the second curve, at --eps; by default 1 to 100, '' for none")
    ] = None,
    restarts: Annotated[str, typer.Option(help="of the third curve, at --eps; '' for none")] = "1,2,5",
    calibration: Calibration = None,
    sampling: options.Sampling = IMAGES,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Robust accuracy against eps, steps and restarts: does more effort of the attacker count for more?"""
    conduct(
        ctx,
        "curves",
        Opening(model, sampling, threat, choice),
        run,
        attack=attack,
        budgets=None if budgets is None else tuple(read_quantity(part.strip(), "eps") for part in budgets.split(",")),
        steps=None if steps is None else _counts(steps, "--steps"),
        restarts=_counts(restarts, "--restarts"),
        calibration=calibration,
    )


@app.command()
@bundled
def saturation(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: _Attack = "pgd-20",
    images: _Images = 1280,
    calibration: Calibration = None,
    sampling: options.Sampling = IMAGES,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Gaps before the softmax, block by block, before and after AAS: is attention saturated?"""
    opening = Opening(model, sampling, threat, choice)
    conduct(ctx, "saturation", opening, run, attack=attack, images=images, calibration=calibration)


@app.command("scaled-blocks")
@bundled
def scaled_blocks(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: _Attack = "pgd-20",
    ways: Annotated[
        str, typer.Option(help="which blocks: first (k), single, last (k), comma-separated")
    ] = "first,single,last",
    every: Annotated[int, typer.Option(help="grow k by so many")] = 1,
    images: _Images = 1280,
    calibration: Calibration = None,
    sampling: options.Sampling = IMAGES,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """AAS with only some blocks scaled, judged on the deployed model and, beside it, as in the paper."""
    opening = Opening(model, sampling, threat, choice)
    chosen = tuple(way.strip() for way in ways.split(","))
    own = {"attack": attack, "ways": chosen, "every": every, "images": images, "calibration": calibration}
    conduct(ctx, "scaled-blocks", opening, run, **own)


app.registered_commands += study_pictures.app.registered_commands


def _counts(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers, comma-separated; none for ''."""
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise UserError(f"{flag} takes whole numbers, comma-separated, e.g. 1,2,5; got {text!r}") from None
