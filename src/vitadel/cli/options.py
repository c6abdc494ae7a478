"""Flags that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitadel.amounts import read_amount
from vitadel.errors import Mistake

Model = Annotated[
    str, typer.Argument(help="zoo:NAME, a timm name, hf:ORG/NAME, a run folder, or python:module:function")
]
Data = Annotated[str, typer.Option(help="shapes, cifar10, folder:DIR, parquet:GLOB, ...; see 'vitadel list data'")]
DataRoot = Annotated[Path | None, typer.Option(help="where torchvision sets and benchmark files lie")]
Weights = Annotated[str | None, typer.Option(help="weight file, 'pretrained' (timm's download) or 'random'")]
NumClasses = Annotated[int | None, typer.Option(help="number of classes, where the model's name does not say it")]
Mean = Annotated[str | None, typer.Option(help="normalisation mean, e.g. 0.5 or 0.485,0.456,0.406")]
Std = Annotated[str | None, typer.Option(help="normalisation standard deviation, likewise")]
InputSize = Annotated[int | None, typer.Option(help="image size in pixels, where it differs from the model's own")]
SmallImages = Annotated[bool, typer.Option("--small-images", help="adapt a patch-16 ViT or XCiT to 32 px images")]
Tokens = Annotated[str | None, typer.Option(help="file of robustness tokens for the model (see 'vitadel harden')")]
AllowReadable = Annotated[
    bool, typer.Option("--allow-readable", help="take a token file that others than its owner can read")
]
Attacks = Annotated[str, typer.Option(help="comma-separated, e.g. fgsm,pgd-20(restarts=5); see 'vitadel list attacks'")]
Norm = Annotated[str, typer.Option(help="linf, l2 or l1")]
Eps = Annotated[str, typer.Option(help="budget in pixels of [0, 1], e.g. 8/255")]
Limit = Annotated[int | None, typer.Option(help="a seeded, class-balanced subset of so many samples")]
BatchSize = Annotated[int, typer.Option(help="samples per batch")]
Seed = Annotated[int, typer.Option(help="random numbers are keyed by this and the sample")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16")]
Compile = Annotated[bool, typer.Option("--compile", help="try torch.compile, and use it if it is faster here")]
Calibration = Annotated[
    str | None,
    typer.Option(
        help="data that aas+ and patches-learned may study; else the training split or what --limit leaves out"
    ),
]
Out = Annotated[Path | None, typer.Option(help="run folder; by default a new one below runs/")]
Resume = Annotated[bool, typer.Option("--resume", help="go on with an unfinished run")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="leave out unreadable samples and count them")]
Json = Annotated[bool, typer.Option("--json", help="print the results as JSON on standard output")]


def model_options(
    weights: str | None,
    num_classes: int | None,
    mean: str | None,
    std: str | None,
    input_size: int | None,
    small_images: bool,
) -> dict[str, Any]:
    """The flags about the model, as `load_model` takes them."""
    return {
        "weights": weights,
        "num_classes": num_classes,
        "mean": _numbers(mean, "--mean"),
        "std": _numbers(std, "--std"),
        "input_size": input_size,
        "small_images": small_images,
    }


def _numbers(text: str | None, what: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    numbers = tuple(read_amount(part.strip(), what) for part in text.split(","))
    if len(numbers) not in (1, 3):
        raise Mistake(f"{what} takes one number or three, one per colour channel; got {text!r}")
    return numbers * (3 // len(numbers))
