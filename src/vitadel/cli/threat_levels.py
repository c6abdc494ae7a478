"""`vitadel audit --suite ladder`: secret tokens against attackers who know more and more."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitadel.cli import run_verb
from vitadel.cli.options import Choice, Running, Sampling
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

if TYPE_CHECKING:
    from vitadel.threat_levels.request import ThreatLevelsRequest

_PANEL = "Ladder (--suite ladder)"


@dataclass(frozen=True)
class LadderFlags:
    """How far attackers go."""

    levels: Annotated[
        str | None, typer.Option(help="only these, e.g. T2,T3,T6; all of T0 to T8 by default", rich_help_panel=_PANEL)
    ] = None
    steps: Annotated[
        int, typer.Option(help="of attacks with gradients; T2+ has one with four times as many", rich_help_panel=_PANEL)
    ] = 30
    queries: Annotated[int, typer.Option(help="score queries per image (T5)", rich_help_panel=_PANEL)] = 5000
    white_box: Annotated[
        str, typer.Option(help="attacks through the tokens, beside pgd (T6)", rich_help_panel=_PANEL)
    ] = "apgd-ce,apgd-t"
    surrogates: Annotated[
        str,
        typer.Option(help="how many token sets attackers train (T3, T4), or files of theirs", rich_help_panel=_PANEL),
    ] = "2"
    bank: Annotated[
        str,
        typer.Option(
            help="how many more sets the defender trains for a bank (T8), or their files", rich_help_panel=_PANEL
        ),
    ] = "2"
    recipe: Annotated[
        str | None,
        typer.Option(
            help="how the tokens were trained, NAME or NAME:ROW; by default the run's", rich_help_panel=_PANEL
        ),
    ] = None
    attacker_data: Annotated[
        str | None,
        typer.Option(
            help="images that attackers train and fit on; by default those of the recipe, and to fit (T7) the training "
            "split of the audited data, or images that are not audited",
            rich_help_panel=_PANEL,
        ),
    ] = None
    head: Annotated[
        str | None, typer.Option(help="the victim's head, made by 'vitadel probe'", rich_help_panel=_PANEL)
    ] = None
    attacker_head: Annotated[
        str | None, typer.Option(help="the attacker's own head (T2), likewise", rich_help_panel=_PANEL)
    ] = None
    other: Annotated[
        str | None, typer.Option(help="another MODEL for the same classes (T1)", rich_help_panel=_PANEL)
    ] = None
    other_weights: Annotated[str | None, typer.Option(help="its weights", rich_help_panel=_PANEL)] = None


def climb(model: str, choice: Choice, sampling: Sampling, run: Running, flags: LadderFlags, eps: str | None) -> None:
    """The whole ladder, told; `eps` None means its own budgets."""
    from vitadel.adapters.adapted_model import token_run
    from vitadel.backbones.load import has_no_head, load_model
    from vitadel.heads.head_files import load_head
    from vitadel.reporting import terminal
    from vitadel.reporting.kinds import threat_levels as told
    from vitadel.runtime.distributed import join_processes
    from vitadel.threat_levels.run import run_ladder

    if flags.other_weights is not None and flags.other is None:
        raise UserError(
            "--other-weights are those of another model (T1): name it with --other MODEL, or leave them out"
        )
    trained = token_run(model) or {}
    name = str(trained.get("name", model))
    if flags.head is None and has_no_head(name, choice.weights or trained.get("weights")):
        raise UserError(
            f"'{name}' has no classifier of its own: train a head by `vitadel probe`, with the tokens, and give it "
            "with --head"
        )
    request = _request(model, choice, sampling, flags, eps)
    processes = join_processes(run.device)
    target = run_verb.open_chosen(model, choice, sampling, for_features=flags.head is not None)
    outcome = run_ladder(
        target,
        request,
        processes,
        head=None if flags.head is None else partial(load_head, flags.head),
        own_head=None if flags.attacker_head is None else partial(load_head, flags.attacker_head),
        other=None if flags.other is None else load_model(flags.other, weights=flags.other_weights),
        out=run.out,
        resume=run.resume,
        show_progress=True,
        argv=sys.argv[1:],
        show_plan=lambda text: typer.echo(text, err=True) if processes.is_main else None,
    )
    if not outcome.is_main or outcome.folder is None:
        return

    def show(results: dict[str, Any]) -> None:
        told.show_ladder(results)
        terminal.show_findings(results["findings"])

    run_verb.tell(outcome.results, outcome.folder.path, run, show)


def _request(
    model: str, choice: Choice, sampling: Sampling, flags: LadderFlags, eps: str | None
) -> ThreatLevelsRequest:
    from vitadel.adapters.adapted_model import token_run
    from vitadel.attacks.parse import split_attack_list
    from vitadel.threat_levels.levels import LEVELS
    from vitadel.threat_levels.request import BUDGETS, ThreatLevelsRequest

    own_recipe = str(Path(model) / "recipe.yaml") if token_run(model) is not None else None
    if own_recipe is None and "/" in model and ":" not in model and not Path(model).exists():
        raise UserError(f"'{model}' does not exist: there is no run folder, and no weight file, of that name")
    return ThreatLevelsRequest(
        eps=BUDGETS if eps is None else tuple(read_quantity(part.strip(), "eps") for part in eps.split(",")),
        levels=tuple(LEVELS) if flags.levels is None else _listed(flags.levels.upper()),
        steps=flags.steps,
        queries=flags.queries,
        white_box=tuple(split_attack_list(flags.white_box)) if flags.white_box else (),
        surrogates=_count_or_files(flags.surrogates, "--surrogates"),
        bank=_count_or_files(flags.bank, "--bank"),
        recipe=flags.recipe or own_recipe,
        attacker_data=flags.attacker_data,
        allow_readable=choice.allow_readable,
        **sampling.for_request(),
    )


def _count_or_files(text: str, flag: str) -> int | tuple[str, ...]:
    """A number of token sets to train, or files of sets that are there."""
    if text.strip().isdigit():
        return int(text)
    files = _listed(text)
    if not files or any(_is_number(file) and not Path(file).exists() for file in files):
        raise UserError(f"{flag} is a number of token sets to train, 0 or more, or token files a,b,...; got {text!r}")
    return files


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
