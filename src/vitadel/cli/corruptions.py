"""`vitadel audit --suite corruptions`: errors on corrupted images, and flips along sequences."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from vitadel.cli import run_verb
from vitadel.cli.options import Choice, Running, Sampling
from vitadel.errors import UserError

__all__ = ["CorruptionFlags", "corruption_list", "run_corruptions", "severity_list"]

_PANEL = "Corruptions (--suite corruptions)"


@dataclass(frozen=True)
class CorruptionFlags:
    """Which corruptions, how strong, and whether to film them."""

    corruptions: Annotated[
        str,
        typer.Option(
            help="common (the 15 of mCE), all (with the 4 for validation), none, or names: fog,snow",
            rich_help_panel=_PANEL,
        ),
    ] = "common"
    severities: Annotated[str, typer.Option(help="some of 1,2,3,4,5", rich_help_panel=_PANEL)] = "1,2,3,4,5"
    perturbations: Annotated[
        str,
        typer.Option(help="sequences of ImageNet-P: all (the 10 of mFR), none, or names", rich_help_panel=_PANEL),
    ] = "none"
    difficulty: Annotated[
        int, typer.Option(help="1, 2 or 3: how far sequences go from frame to frame", rich_help_panel=_PANEL)
    ] = 1
    clean_data: Annotated[
        str | None,
        typer.Option(help="for imagenet-c:DIR and cifar10-c: the clean images, as SPEC", rich_help_panel=_PANEL),
    ] = None


def run_corruptions(
    model: str, choice: Choice, sampling: Sampling, run: Running, flags: CorruptionFlags, precision: str = "fp32"
) -> None:
    """The whole benchmark, told."""
    from vitadel.evaluation.corruptions import run as corruptions
    from vitadel.evaluation.corruptions.request import CorruptionRequest
    from vitadel.reporting.kinds.corruptions import show_corruptions
    from vitadel.runtime.distributed import join_processes

    request = CorruptionRequest(
        corruptions=corruption_list(flags.corruptions),
        severities=severity_list(flags.severities),
        perturbations={"none": (), "all": None}.get(flags.perturbations, _names(flags.perturbations)),
        difficulty=flags.difficulty,
        clean_data=flags.clean_data,
        precision=precision,
        **sampling.for_request(),
    )
    processes = join_processes(run.device)
    outcome = corruptions.run_corruptions(
        run_verb.open_chosen(model, choice, sampling),
        request,
        processes,
        out=run.out,
        resume=run.resume,
        show_progress=True,
        argv=sys.argv[1:],
    )
    if outcome.is_main and outcome.folder is not None:
        run_verb.tell(outcome.results, outcome.folder.path, run, show_corruptions)


def corruption_list(text: str) -> tuple[str, ...] | None:
    """None for the usual ones, or names."""
    from vitadel.corruptions.constants import COMMON, EXTRA

    return {"common": None, "all": (*COMMON, *EXTRA), "none": ()}.get(text.strip(), _names(text))


def severity_list(text: str) -> tuple[int, ...]:
    """Whole numbers; which are allowed is for the order to say."""
    parts = _names(text)
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--severities takes some of 1, 2, 3, 4, 5, separated by commas; got {text!r}")
    return tuple(int(part) for part in parts)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip().replace("-", "_") for part in text.split(",") if part.strip())
