"""Studies whose answer is looked at: perturbations, pictures out of noise, attention, masks of a corruption model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitadel.cli import options
from vitadel.cli.flag_groups import bundled
from vitadel.cli.run_or_model import IMAGES, Calibration, Opening, RunOrModel, conduct
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

_Others = Annotated[
    str | None,
    typer.Option(help="other MODELs (or MODEL=WEIGHTS) for the same classes, comma-separated; by default the zoo's"),
]
_Attack = Annotated[str, typer.Option(help="one attack, which goes all the way; see 'vitadel list attacks'")]

app = typer.Typer()


@app.command()
@bundled
def perturbations(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: _Attack = "pgd-100",
    others: _Others = None,
    calibration: Calibration = None,
    sampling: options.Sampling = IMAGES,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """What do other models see in an attack's perturbations alone?"""
    opening = Opening(model, sampling, threat, choice)
    conduct(ctx, "perturbations", opening, run, attack=attack, others=_listed(others), calibration=calibration)


@app.command()
@bundled
def accumulation(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    classes: Annotated[
        str | None, typer.Option(help="numbers of the classes to climb to, e.g. 0,3,7; by default the first --most")
    ] = None,
    most: Annotated[int, typer.Option(help="how many classes, where --classes names none")] = 10,
    starts: Annotated[int, typer.Option(help="pictures of each class")] = 10,
    start: Annotated[str, typer.Option(help="what they begin as: noise or grey")] = "noise",
    objective: Annotated[str, typer.Option(help="what is climbed: logit or probability")] = "logit",
    steps: Annotated[int, typer.Option(help="steps of the climb")] = 100,
    step: Annotated[str, typer.Option(help="length of a step, root mean square over pixels in [0, 1]")] = "0.01",
    others: _Others = None,
    sampling: options.Sampling = IMAGES,
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """What do a model's gradients draw out of noise, and do other models see the class in it?"""
    try:
        chosen = tuple(int(part) for part in _listed(classes))
    except ValueError:
        raise UserError(f"--classes takes numbers of classes, comma-separated, e.g. 0,3,7; got {classes!r}") from None
    conduct(
        ctx,
        "accumulation",
        Opening(model, sampling, options.Threat(), choice),
        run,
        classes=chosen,
        most=most,
        starts=starts,
        start=start,
        objective=objective,
        steps=steps,
        step=read_quantity(step, "--step"),
        others=_listed(others),
    )


@app.command()
@bundled
def attention(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: _Attack = "pgd-20",
    query: Annotated[str, typer.Option(help="who looks: centre, class, or a patch as ROW,COL")] = "centre",
    block: Annotated[str, typer.Option(help="last, or the number of an attention in running order")] = "last",
    heads: Annotated[str, typer.Option(help="mean, or each by itself, too")] = "mean",
    calibration: Calibration = None,
    sampling: options.Sampling = IMAGES,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Where does a patch look, clean and under attack, and how much of that stays?"""
    own = {"attack": attack, "query": query, "block": block, "heads": heads, "calibration": calibration}
    conduct(ctx, "attention", Opening(model, sampling, threat, choice), run, **own)


@app.command("corruption-masks")
@bundled
def corruption_masks(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    selector: Annotated[
        Path | None, typer.Option(help="corruption-model.safetensors, or the run folder that has it; else trained")
    ] = None,
    share: Annotated[str, typer.Option(help="share of patches that get noise")] = "0.1",
    fills: Annotated[int, typer.Option(help="times that the patches of an image are filled with noise")] = 10,
    training_steps: Annotated[int, typer.Option(help="of a corruption model that is trained here")] = 60,
    noise: Annotated[
        str, typer.Option(help="drawn in the model's normalised space, or all colours: pixel")
    ] = "normalised",
    patch_side: Annotated[int, typer.Option(help="pixels; 0 for the patches that the model sees")] = 0,
    calibration: Annotated[str | None, typer.Option(help="data to train it on; else the training split")] = None,
    sampling: options.Sampling = IMAGES,
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Which patches does a corruption model choose, how evenly, and is it worse than chance?"""
    conduct(
        ctx,
        "corruption-masks",
        Opening(model, sampling, options.Threat(), choice),
        run,
        selector=None if selector is None else str(selector),
        share=read_quantity(share, "--share"),
        fills=fills,
        training_steps=training_steps,
        noise=noise,
        side=patch_side,
        calibration=calibration,
    )


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
