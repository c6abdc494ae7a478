"""Flags that several verbs share, in groups: a verb takes a frozen dataclass of flags instead of each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

RARE = "Rarely needed"

Model = Annotated[
    str, typer.Argument(help="zoo:NAME, a timm name, hf:ORG/NAME, a run folder, or python:module:function")
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN-OR-MODEL", help="run folder of an audit, or a MODEL as 'vitadel audit' takes it")
]
DataRoot = Annotated[
    Path | None, typer.Option(help="folder of torchvision data sets and benchmark files", rich_help_panel=RARE)
]
AllowReadable = Annotated[
    bool,
    typer.Option("--allow-readable", help="accept a token file that other users can read", rich_help_panel=RARE),
]
Eps = Annotated[str, typer.Option(help="perturbation budget for pixels in [0, 1], e.g. 8/255")]
Norm = Annotated[str, typer.Option(help="linf, l2 or l1")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
Json = Annotated[bool, typer.Option("--json", help="print the results as JSON on standard output")]
Row = Annotated[str | None, typer.Option(help="row of the table, for a recipe that is a whole table")]
Calibration = Annotated[
    str | None,
    typer.Option(help="data that calibrated attacks (aas+, patches-learned) fit on", rich_help_panel=RARE),
]
Precision = Annotated[str, typer.Option(help="fp32, bf16 or fp16", rich_help_panel=RARE)]


@dataclass(frozen=True)
class ModelFlags:
    """How a MODEL is opened."""

    weights: Annotated[str | None, typer.Option(help="weight file, 'pretrained' (timm's download) or 'random'")] = None
    num_classes: Annotated[int | None, typer.Option(help="number of classes of a timm model's head")] = None
    mean: Annotated[
        str | None, typer.Option(help="normalization mean, e.g. 0.5 or 0.485,0.456,0.406", rich_help_panel=RARE)
    ] = None
    std: Annotated[str | None, typer.Option(help="normalization standard deviation", rich_help_panel=RARE)] = None
    input_size: Annotated[
        int | None, typer.Option(help="image size in pixels, if not the model's own", rich_help_panel=RARE)
    ] = None
    crop_pct: Annotated[
        str | None, typer.Option(help="center crop as a share of the resized image, e.g. 0.875", rich_help_panel=RARE)
    ] = None
    interpolation: Annotated[
        str | None, typer.Option(help="how images are resized, e.g. bicubic", rich_help_panel=RARE)
    ] = None
    head_classes: Annotated[
        str | None, typer.Option(help="keep only these outputs of the head, e.g. 0,217,482", rich_help_panel=RARE)
    ] = None
    small_images: Annotated[
        bool, typer.Option("--small-images", help="adapt a patch-16 ViT or XCiT to 32 px images", rich_help_panel=RARE)
    ] = False
    tokens: Annotated[
        str | None,
        typer.Option(help="file of robustness tokens; a,b is a bank, one drawn per image", rich_help_panel=RARE),
    ] = None
    allow_readable: AllowReadable = False


@dataclass(frozen=True)
class DataFlags:
    """Which images, and how many at once."""

    data: Annotated[str, typer.Option(help="shapes, cifar10, folder:DIR, ...; see 'vitadel list data'")]
    data_root: DataRoot = None
    limit: Annotated[int | None, typer.Option(help="use a seeded, class-balanced subset of this size")] = None
    batch_size: Annotated[int, typer.Option(help="samples per batch")] = 64
    seed: Annotated[int, typer.Option(help="random seed (each sample has its own random stream)")] = 0
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="leave out unreadable samples and count them", rich_help_panel=RARE)
    ] = False

    def for_request(self) -> dict[str, Any]:
        """The fields of these flags that every request of a run has; the data set itself is opened separately."""
        return {"limit": self.limit, "batch_size": self.batch_size, "seed": self.seed, "skip_bad": self.skip_bad}


@dataclass(frozen=True)
class ThreatFlags:
    """What an attacker may do to a pixel."""

    eps: Eps = "8/255"
    norm: Norm = "linf"


@dataclass(frozen=True)
class AttackFlags:
    """Which attacks, within which budget."""

    attacks: Annotated[str, typer.Option(help="e.g. fgsm,'pgd-20(restarts=5)'; see 'vitadel list attacks'")]
    eps: Eps = "8/255"
    norm: Norm = "linf"
    compile_model: Annotated[
        bool, typer.Option("--compile", help="use torch.compile if it is faster here", rich_help_panel=RARE)
    ] = False


@dataclass(frozen=True)
class RunFlags:
    """Where a run computes, where its folder goes, and how results are printed."""

    device: Device = "auto"
    out: Annotated[Path | None, typer.Option(help="run folder; by default a new one below runs/")] = None
    resume: Annotated[bool, typer.Option("--resume", help="continue an unfinished run")] = False
    as_json: Json = False


def expand_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with the signature that typer needs: one flag for each field of a parameter that is a dataclass.

    The fields are annotated like parameters of a verb. The parameter's default is an instance, whose values are the
    defaults of the flags, so that verbs can share a group and differ in a default.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)}

    @wraps(verb)
    def call(**given: Any) -> None:
        packed = {name: kind(**{flag: given.pop(flag) for flag in flag_names(kind)}) for name, kind in groups.items()}
        verb(**given, **packed)

    def parameters() -> Iterator[inspect.Parameter]:
        for name, parameter in inspect.signature(verb).parameters.items():
            if name not in groups:
                yield parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            annotations = get_type_hints(groups[name], include_extras=True)
            for flag, default in asdict(parameter.default).items():
                kind = inspect.Parameter.KEYWORD_ONLY
                yield inspect.Parameter(flag, kind, default=default, annotation=annotations[flag])

    expanded = list(parameters())
    call.__dict__["__signature__"] = inspect.Signature(expanded)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in expanded}
    return call


def flag_names(group: type[Any]) -> tuple[str, ...]:
    """Return the names of a group's flags, as parameters."""
    return tuple(each.name for each in fields(group))


def given_flags(ctx: typer.Context) -> set[str]:
    """Return the names of the flags that were typed, as parameters."""
    return {name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}


def spell_flag(name: str) -> str:
    """Return a parameter's flag as it is typed."""
    return f"--{name.removesuffix('_model').replace('_', '-')}"


def split_list(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list; empty for None and ''."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
