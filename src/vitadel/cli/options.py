"""Flags that several verbs share, and the bundles in which they take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitadel.errors import UserError
from vitadel.quantities import read_quantity

__all__ = ["Attacking", "Choice", "Conduct", "Model", "Running", "Sampling", "Threat"]

Model = Annotated[
    str, typer.Argument(help="zoo:NAME, a timm name, hf:ORG/NAME, a run folder, or python:module:function")
]
DataRoot = Annotated[Path | None, typer.Option(help="where torchvision sets and benchmark files lie")]
AllowReadable = Annotated[
    bool, typer.Option("--allow-readable", help="take a token file that others than its owner can read")
]
Eps = Annotated[str, typer.Option(help="budget in pixels of [0, 1], e.g. 8/255")]
Norm = Annotated[str, typer.Option(help="linf, l2 or l1")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
Json = Annotated[bool, typer.Option("--json", help="print the results as JSON on standard output")]
Row = Annotated[str | None, typer.Option(help="which row, for a recipe that is a whole table")]


@dataclass(frozen=True)
class Choice:
    """How a MODEL is opened."""

    weights: Annotated[str | None, typer.Option(help="weight file, 'pretrained' (timm's download) or 'random'")] = None
    num_classes: Annotated[
        int | None, typer.Option(help="number of classes, where the model's name does not say it")
    ] = None
    mean: Annotated[str | None, typer.Option(help="normalisation mean, e.g. 0.5 or 0.485,0.456,0.406")] = None
    std: Annotated[str | None, typer.Option(help="normalisation standard deviation, likewise")] = None
    input_size: Annotated[
        int | None, typer.Option(help="image size in pixels, where it differs from the model's own")
    ] = None
    crop_pct: Annotated[
        str | None,
        typer.Option(help="share of a resized image that is kept, e.g. 0.875, where it differs from the model's own"),
    ] = None
    interpolation: Annotated[
        str | None, typer.Option(help="how images are resized, e.g. bicubic, where it differs from the model's own")
    ] = None
    head_classes: Annotated[
        str | None, typer.Option(help="keep these of its classes, for data that have no others, e.g. 0,217,482")
    ] = None
    small_images: Annotated[
        bool, typer.Option("--small-images", help="adapt a patch-16 ViT or XCiT to 32 px images")
    ] = False
    tokens: Annotated[
        str | None,
        typer.Option(
            help="file of robustness tokens for the model (see 'vitadel harden'); several, with commas between them, "
            "are a bank, from which one is drawn for each image"
        ),
    ] = None
    allow_readable: AllowReadable = False

    def for_loading(self) -> dict[str, Any]:
        """The flags about the model itself, as `load_model` takes them."""
        return {
            "weights": self.weights,
            "num_classes": self.num_classes,
            "mean": _numbers(self.mean, "--mean"),
            "std": _numbers(self.std, "--std"),
            "input_size": self.input_size,
            "crop_pct": None if self.crop_pct is None else read_quantity(self.crop_pct, "--crop-pct"),
            "interpolation": self.interpolation,
            "small_images": self.small_images,
            "head_classes": _whole_numbers(self.head_classes, "--head-classes"),
        }


@dataclass(frozen=True)
class Sampling:
    """Which images, and in which portions."""

    data: Annotated[str, typer.Option(help="shapes, cifar10, folder:DIR, parquet:GLOB, ...; see 'vitadel list data'")]
    data_root: DataRoot = None
    limit: Annotated[int | None, typer.Option(help="a seeded, class-balanced subset of so many samples")] = None
    batch_size: Annotated[int, typer.Option(help="samples per batch")] = 64
    seed: Annotated[int, typer.Option(help="random numbers are keyed by this and the sample")] = 0
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="leave out unreadable samples and count them")] = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= 2**62:  # as in recipes
            raise UserError(f"--seed must be a whole number from 0 to 2**62, got {self.seed}")

    def for_request(self) -> dict[str, Any]:
        """What every order of a run takes of it; the data themselves are opened apart."""
        return {"limit": self.limit, "batch_size": self.batch_size, "seed": self.seed, "skip_bad": self.skip_bad}


@dataclass(frozen=True)
class Threat:
    """What an attacker may do to a pixel."""

    eps: Eps = "8/255"
    norm: Norm = "linf"


@dataclass(frozen=True)
class Attacking:
    """Which attacks, within which budget."""

    attacks: Annotated[
        str, typer.Option(help="comma-separated, e.g. fgsm,pgd-20(restarts=5); see 'vitadel list attacks'")
    ]
    eps: Eps = "8/255"
    norm: Norm = "linf"
    compile_model: Annotated[
        bool, typer.Option("--compile", help="try torch.compile, and use it if it is faster here")
    ] = False


@dataclass(frozen=True)
class Conduct:
    """How attacks are run, where their result may depend on it."""

    calibration: Annotated[
        str | None,
        typer.Option(
            help="data that aas+ and patches-learned may study; else the training split or what --limit leaves out"
        ),
    ] = None
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16")] = "fp32"


@dataclass(frozen=True)
class Running:
    """Where a run happens, where it goes, and how it is told."""

    device: Device = "auto"
    out: Annotated[Path | None, typer.Option(help="run folder; by default a new one below runs/")] = None
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished run")] = False
    as_json: Json = False


def _whole_numbers(text: str | None, what: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"{what} takes numbers of classes with commas between them, as in 0,217,482; got {text!r}")
    return tuple(int(part) for part in parts)


def _numbers(text: str | None, what: str) -> tuple[float, ...] | None:
    if text is None:
        return None
    numbers = tuple(read_quantity(part.strip(), what) for part in text.split(","))
    if len(numbers) not in (1, 3):
        raise UserError(f"{what} takes one number or three, one per colour channel; got {text!r}")
    return numbers * (3 // len(numbers))
