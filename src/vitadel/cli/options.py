"""Flags that several verbs share, in groups: a verb takes a frozen dataclass of flags instead of each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def option(about: str, *flags: str) -> Any:
    """Return a flag with its help; without `flags` it is named after its parameter."""
    return typer.Option(*flags, help=about)


def rare(about: str, *flags: str) -> Any:
    """Return such a flag in the panel of those that are rarely needed."""
    return typer.Option(*flags, help=about, rich_help_panel="Rarely needed")


Model = Annotated[
    str,
    typer.Argument(help="zoo:NAME, a timm name, published:NAME, hf:ORG/NAME, a run folder, or python:module:function"),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN-OR-MODEL", help="run folder of an audit, or a MODEL as 'vitadel audit' takes it")
]
DataRoot = Annotated[Path | None, rare("folder of data sets and benchmark files")]
AllowReadable = Annotated[bool, rare("accept a token file that other users can read", "--allow-readable")]
Eps = Annotated[str, option("budget for pixels in [0, 1]")]
Norm = Annotated[str, option("linf, l2 or l1")]
Device = Annotated[str, option("auto, cpu, cuda, cuda:1")]
Json = Annotated[bool, option("print the results as JSON on standard output", "--json")]
Row = Annotated[str | None, option("row of the table, for a recipe that is a whole table")]
Calibration = Annotated[str | None, rare("data that aas+ and patches-learned fit on")]
Launcher = Annotated[str | None, rare("submit jobs, e.g. slurm(shards=16)", "--launcher")]
Precision = Annotated[str, rare("fp32, bf16 or fp16")]


@dataclass(frozen=True)
class ModelFlags:
    """How a MODEL is opened."""

    weights: Annotated[str | None, option("weight file, 'pretrained' (timm's download) or 'random'")] = None
    num_classes: Annotated[int | None, option("number of classes of a timm model's head")] = None
    mean: Annotated[str | None, rare("normalization mean, e.g. 0.485,0.456,0.406")] = None
    std: Annotated[str | None, rare("normalization standard deviation")] = None
    no_normalize: Annotated[bool, rare("raw pixels in [0, 1]: --mean 0 --std 1", "--no-normalize")] = False
    input_size: Annotated[int | None, rare("image size in pixels, if not the model's own")] = None
    crop_pct: Annotated[str | None, rare("share of the image that is kept, e.g. 0.875")] = None
    interpolation: Annotated[str | None, rare("how images are resized, e.g. bicubic")] = None
    crop_mode: Annotated[str | None, rare("center, squash or border (padded)")] = None
    model_kwargs: Annotated[
        list[str] | None, rare("KEY=VALUE for timm, e.g. depth=12, or attention_scale=10; repeatable", "--model-kwargs")
    ] = None
    head_classes: Annotated[str | None, rare("keep only these outputs, e.g. 0,217,482")] = None
    small_images: Annotated[bool, rare("adapt a patch-16 ViT or XCiT to 32 px images", "--small-images")] = False
    tokens: Annotated[str | None, rare("file of robustness tokens; a,b is a bank")] = None
    allow_readable: AllowReadable = False


@dataclass(frozen=True)
class ClassifierFlags(ModelFlags):
    """How a MODEL is opened whose outputs are matched with the classes of the data."""

    class_file: Annotated[str | None, rare("file with the class name of each output", "--classes")] = None
    among: Annotated[str, rare("judge among 'all' outputs or the 'data'")] = "all"


@dataclass(frozen=True)
class DataFlags:
    """Which images, and how many at once."""

    data: Annotated[str, option("e.g. folder:DIR; see 'vitadel list data'")]
    data_root: DataRoot = None
    limit: Annotated[int | None, option("use a seeded, class-balanced subset of this size")] = None
    batch_size: Annotated[int, option("samples per batch")] = 64
    seed: Annotated[int, option("random seed (every sample has its own stream)")] = 0
    skip_bad: Annotated[bool, rare("leave out unreadable samples and count them", "--skip-bad")] = False

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

    attacks: Annotated[str, option("one or a list; see 'vitadel list attacks'")]
    eps: Eps = "8/255"
    norm: Annotated[str, option("linf, l2 or l1; audit takes the union of a list")] = "linf"
    compile_model: Annotated[bool, rare("use torch.compile if it is faster here", "--compile")] = False
    escalate: Annotated[bool, rare("all of AutoAttack if gradients look masked", "--escalate/--no-escalate")] = True


@dataclass(frozen=True)
class RunFlags:
    """Where a run computes, where its folder goes, and how results are printed."""

    device: Device = "auto"
    out: Annotated[Path | None, option("run folder; by default a new one below runs/")] = None
    resume: Annotated[bool, option("continue an unfinished run", "--resume")] = False
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
    return _SPELLED.get(name) or f"--{name.removesuffix('_model').replace('_', '-')}"


_SPELLED = {"class_file": "--classes"}


def split_list(text: str | None) -> tuple[str, ...]:
    """Split a comma-separated list; empty for None and ''."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
