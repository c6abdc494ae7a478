"""`vitadel study NAME RUN-OR-MODEL`: the papers' analyses on a model of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from vitadel.cli.execution import present, run_options
from vitadel.cli.options import (
    Calibration,
    DataFlags,
    ModelFlags,
    RunFlags,
    RunOrModel,
    ThreatFlags,
    expand_groups,
    flag_names,
    given_flags,
    option,
    split_list,
)
from vitadel.cli.stability import Noise, PatchSide, Share
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

_Attack = Annotated[str, option("one attack; see 'vitadel list attacks'")]
_Images = Annotated[int, option("calibration images on which aas finds its factors")]
_Classes = Annotated[str | None, option("numbers of the target classes, e.g. 0,3,7 (default: the first --most)")]
_Preset = Annotated[str, option("ours, or paper: the steps of the thesis' own code")]
_Others = Annotated[
    str | None, option("other MODELs (or MODEL=WEIGHTS) for the same classes, comma-separated (default: the zoo's)")
]


@dataclass(frozen=True)
class Curves(ThreatFlags):
    """Plot robust accuracy against eps, steps and restarts."""

    attack: Annotated[str, option("one attack, without K: pgd, cw, aas+pgd, 'pgd(step=1/255)'")] = "pgd"
    budgets: Annotated[str | None, option("of the first curve, e.g. 0,4/255,8/255 (default: 0 to twice --eps)")] = None
    steps: Annotated[str | None, option("of the second curve, at --eps; '' for none (default: 1 to 100)")] = None
    restarts: Annotated[str, option("of the third curve, at --eps; '' for none")] = "1,2,5"
    calibration: Calibration = None


@dataclass(frozen=True)
class Saturation(ThreatFlags):
    """Measure how saturated the softmax of each attention block is, before and after AAS."""

    attack: _Attack = "pgd-20"
    clean_only: Annotated[bool, option("score gaps on clean images only: no attack, no search", "--clean-only")] = False
    images: _Images = 1280
    calibration: Calibration = None


@dataclass(frozen=True)
class Gradients(ThreatFlags):
    """Measure how noisy input gradients are, with and without the factors of AAS."""

    images: _Images = 1280
    calibration: Calibration = None


@dataclass(frozen=True)
class ScaledBlocks(ThreatFlags):
    """Run AAS with only some blocks scaled; judge on the deployed model and as in the paper."""

    attack: _Attack = "pgd-20"
    ways: Annotated[str, option("which blocks: first (k), single, last (k), comma-separated")] = "first,single,last"
    every: Annotated[int, option("increase k by this number")] = 1
    images: _Images = 1280
    calibration: Calibration = None


@dataclass(frozen=True)
class Perturbations(ThreatFlags):
    """Ask other models what they see in an attack's perturbations alone."""

    attack: _Attack = "pgd-100"
    preset: _Preset = "ours"
    others: _Others = None
    calibration: Calibration = None


@dataclass(frozen=True)
class Accumulation:
    """Draw classes out of noise along a model's gradients, and ask other models about them."""

    classes: _Classes = None
    most: Annotated[int, option("number of classes, if --classes names none")] = 10
    starts: Annotated[int, option("images of each class")] = 10
    start: Annotated[str, option("starting point: noise or grey")] = "noise"
    objective: Annotated[str, option("what is maximized: logit or probability")] = "logit"
    steps: Annotated[int, option("gradient steps")] = 100
    step: Annotated[str, option("step size, root mean square over pixels in [0, 1]")] = "0.01"
    preset: _Preset = "ours"
    others: _Others = None


@dataclass(frozen=True)
class Attention(ThreatFlags):
    """Show where a patch attends, clean and under attack, and how much of that stays."""

    attack: _Attack = "pgd-20"
    query: Annotated[str, option("query token: centre, class, or a patch as ROW,COL")] = "centre"
    block: Annotated[str, option("last, all, or the number of an attention in running order")] = "last"
    heads: Annotated[str, option("mean, or each (one map per head as well)")] = "mean"
    calibration: Calibration = None


@dataclass(frozen=True)
class CorruptionMasks:
    """Show which patches a corruption model chooses, and whether it does more harm than random choice."""

    selector: Annotated[
        str | None, option("corruption-model.safetensors, or the run folder that has it; else trained")
    ] = None
    share: Share = "0.1"
    fills: Annotated[int, option("noise samples per image")] = 10
    training_steps: Annotated[int, option("steps of training a corruption model here")] = 60
    noise: Noise = "normalised"
    patch_side: PatchSide = 0
    calibration: Annotated[str | None, option("data to train it on (default: the training split)")] = None


STUDIES = {
    "curves": Curves,
    "saturation": Saturation,
    "gradients": Gradients,
    "scaled-blocks": ScaledBlocks,
    "perturbations": Perturbations,
    "accumulation": Accumulation,
    "attention": Attention,
    "corruption-masks": CorruptionMasks,
}
app = typer.Typer(help="Run an analysis of the papers on a model or an audit.", no_args_is_help=True)


def _command(name: str, flags: type[Any]) -> Callable[..., None]:
    """Return the command of a study: its own flags, and those that all studies share."""

    def run_study(ctx: typer.Context, model: str, own: Any, data: DataFlags, how: ModelFlags, run: RunFlags) -> None:
        from vitadel import studies

        values = {**asdict(ThreatFlags()), **asdict(data), **asdict(how), "device": run.device}
        for flag, value in asdict(own).items():
            if flag in flag_names(ThreatFlags):
                values[flag] = value
            else:
                field = {"patch_side": "side"}.get(flag, flag)
                values[field] = _READERS[flag](value) if flag in _READERS and isinstance(value, str) else value
        present(studies.run_study(name, model, values, given_flags(ctx), **run_options(run)), run)

    run_study.__annotations__ |= {"model": RunOrModel, "own": flags}
    run_study.__defaults__ = ("zoo:shapes-robust", flags(), DataFlags("shapes", limit=200), ModelFlags(), RunFlags())
    return expand_groups(run_study)


for _name, _flags in STUDIES.items():
    app.command(_name, help=_flags.__doc__)(_command(_name, _flags))


def _whole_numbers(flag: str) -> Callable[[str], tuple[int, ...]]:
    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in split_list(text))
        except ValueError:
            raise UserError(f"{flag} takes whole numbers, comma-separated, e.g. 1,2,5; got {text!r}") from None

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "budgets": lambda text: tuple(read_quantity(part.strip(), "eps") for part in text.split(",")),
    "steps": _whole_numbers("--steps"),
    "restarts": _whole_numbers("--restarts"),
    "classes": _whole_numbers("--classes"),
    "ways": split_list,
    "others": split_list,
    "share": lambda text: read_quantity(text, "--share"),
    "step": lambda text: read_quantity(text, "--step"),
}
