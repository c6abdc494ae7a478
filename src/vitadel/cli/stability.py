"""`vitadel audit --suite stability`: attention, features and answers when patches are noisy."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitadel.cli import run_verb
from vitadel.cli.options import Choice, Running, Sampling
from vitadel.quantities import read_quantity

_PANEL = "Stability (--suite stability)"


@dataclass(frozen=True)
class StabilityFlags:
    """Which patches, how many masks, what is compared."""

    share: Annotated[str, typer.Option(help="share of patches that get noise", rich_help_panel=_PANEL)] = "0.1"
    masks: Annotated[int, typer.Option(help="random masks per image", rich_help_panel=_PANEL)] = 100
    watched: Annotated[
        int, typer.Option(help="masks per image on which attention and features are compared", rich_help_panel=_PANEL)
    ] = 10
    similarity: Annotated[
        str, typer.Option(help="of attention: map, rows or centre (a whole map, or rows)", rich_help_panel=_PANEL)
    ] = "map"
    noise: Annotated[
        str, typer.Option(help="drawn in the model's normalised space, or all colours: pixel", rich_help_panel=_PANEL)
    ] = "normalised"
    patch_side: Annotated[
        int, typer.Option(help="pixels; 0 for the patches that the model sees", rich_help_panel=_PANEL)
    ] = 0
    selector: Annotated[
        Path | None,
        typer.Option(help="corruption-model.safetensors of another run, tried on this model", rich_help_panel=_PANEL),
    ] = None
    learned: Annotated[
        bool, typer.Option(help="train a corruption model against this model", rich_help_panel=_PANEL)
    ] = True
    patch_attacks: Annotated[
        str, typer.Option(help="attacks run beside it, at 1/255; '' for none", rich_help_panel=_PANEL)
    ] = "pgd-5(step=0.5/255),patch-fool"


def measure(
    model: str, choice: Choice, sampling: Sampling, run: Running, flags: StabilityFlags, calibration: str | None = None
) -> None:
    """The whole suite, told."""
    from vitadel.attacks.parse import split_attack_list
    from vitadel.evaluation.stability.run import StabilityRequest, run_stability
    from vitadel.reporting import terminal
    from vitadel.reporting.kinds.stability import show_stability
    from vitadel.runtime.distributed import join_processes

    request = StabilityRequest(
        share=read_quantity(flags.share, "--share"),
        masks=flags.masks,
        watched=min(flags.watched, flags.masks),
        similarity=flags.similarity,
        noise=flags.noise,
        side=flags.patch_side,
        learned=flags.learned,
        selector=None if flags.selector is None else str(flags.selector),
        attacks=tuple(split_attack_list(flags.patch_attacks)) if flags.patch_attacks else (),
        calibration=calibration,
        **sampling.for_request(),
    )
    processes = join_processes(run.device)
    target = run_verb.open_chosen(model, choice, sampling)
    outcome = run_stability(
        target, request, processes, out=run.out, resume=run.resume, show_progress=True, argv=sys.argv[1:]
    )
    if not outcome.is_main or outcome.folder is None:
        return

    def show(results: dict[str, Any]) -> None:
        show_stability(results)
        terminal.show_findings(results["findings"])

    run_verb.tell(outcome.results, outcome.folder.path, run, show)
