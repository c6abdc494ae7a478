"""`vitadel audit --suite ladder`: secret tokens against attackers who know more and more."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from vitadel.amounts import read_amount
from vitadel.cli import running
from vitadel.errors import Mistake, nearest_names

SUITES = ("ladder",)
_PANEL = "Ladder (--suite ladder)"

Levels = Annotated[
    str | None, typer.Option(help="only these, e.g. T2,T3,T6; all of T0 to T8 by default", rich_help_panel=_PANEL)
]
Steps = Annotated[int, typer.Option(help="steps of every attack with gradients", rich_help_panel=_PANEL)]
Queries = Annotated[int, typer.Option(help="score queries per image (T5)", rich_help_panel=_PANEL)]
WhiteBox = Annotated[str, typer.Option(help="attacks through the tokens, beside pgd (T6)", rich_help_panel=_PANEL)]
Surrogates = Annotated[
    str,
    typer.Option(help="how many token sets attackers train (T3, T4), or files of theirs", rich_help_panel=_PANEL),
]
Bank = Annotated[
    str,
    typer.Option(help="how many more sets the defender trains for a bank (T8), or their files", rich_help_panel=_PANEL),
]
Recipe = Annotated[
    str | None, typer.Option(help="how the tokens were trained; by default the run's own", rich_help_panel=_PANEL)
]
AttackerData = Annotated[
    str | None,
    typer.Option(help="images that attackers train and fit on; the recipe's by default", rich_help_panel=_PANEL),
]
HeadFile = Annotated[
    str | None, typer.Option("--head", help="the victim's head, made by 'vitadel probe'", rich_help_panel=_PANEL)
]
AttackerHead = Annotated[
    str | None, typer.Option(help="the attacker's own head (T2), likewise", rich_help_panel=_PANEL)
]
Other = Annotated[str | None, typer.Option(help="another MODEL for the same classes (T1)", rich_help_panel=_PANEL)]
OtherWeights = Annotated[str | None, typer.Option(help="its weights", rich_help_panel=_PANEL)]

_OF_AN_AUDIT = ("attacks", "norm", "independent", "calibration", "precision", "compile_model")
_OF_THE_LADDER = (
    "levels",
    "steps",
    "queries",
    "white_box",
    "surrogates",
    "bank",
    "recipe",
    "attacker_data",
    "head",
    "attacker_head",
    "other",
    "other_weights",
)


def refuse_idle_flags(suite: str | None, given: set[str]) -> None:
    """Flags that would be ignored: those of a plain audit with a suite, and those of the ladder without it."""
    idle = [name for name in (_OF_THE_LADDER if suite is None else _OF_AN_AUDIT) if name in given]
    if idle:
        flags = ", ".join(f"--{name.removesuffix('_model').replace('_', '-')}" for name in idle)
        where = "need --suite ladder" if suite is None else f"do not go with --suite {suite}, which is Linf in fp32"
        raise Mistake(f"{flags} {where}; leave them out" + ("" if suite else ", or add it") + ".")


def climb(
    suite: str,
    model: str,
    data: str,
    model_options: Mapping[str, Any],
    *,
    tokens: str | None,
    allow_readable: bool,
    eps: str | None,
    levels: str | None,
    steps: int,
    queries: int,
    white_box: str,
    surrogates: str,
    bank: str,
    recipe: str | None,
    attacker_data: str | None,
    head: str | None,
    attacker_head: str | None,
    other: str | None,
    other_weights: str | None,
    limit: int | None,
    batch_size: int,
    seed: int,
    data_root: Path | None,
    skip_bad: bool,
    device: str,
    out: Path | None,
    resume: bool,
    as_json: bool,
) -> None:
    if suite not in SUITES:
        raise Mistake(f"unknown suite {suite!r}{nearest_names(suite, SUITES) or '.'} Known: {', '.join(SUITES)}.")
    from vitadel.adapters.opening import options_for_features, token_run
    from vitadel.attacks.names import split_attack_list
    from vitadel.backbones.load import load_model
    from vitadel.evaluation.head_files import load_head
    from vitadel.evaluation.subject import open_subject
    from vitadel.ladder.climb import run_ladder
    from vitadel.ladder.levels import LEVELS
    from vitadel.ladder.order import BUDGETS, LadderOrder
    from vitadel.reporting import ladder as told
    from vitadel.reporting import page, terminal
    from vitadel.runtime.processes import join_processes

    own_recipe = str(Path(model) / "recipe.yaml") if token_run(model) is not None else None
    order = LadderOrder(
        eps=BUDGETS if eps is None else tuple(read_amount(part.strip(), "eps") for part in eps.split(",")),
        levels=tuple(LEVELS) if levels is None else tuple(part.strip().upper() for part in levels.split(",")),
        steps=steps,
        queries=queries,
        white_box=tuple(split_attack_list(white_box)) if white_box else (),
        surrogates=_count_or_files(surrogates),
        bank=_count_or_files(bank),
        recipe=recipe or own_recipe,
        attacker_data=attacker_data,
        limit=limit,
        batch_size=batch_size,
        seed=seed,
        skip_bad=skip_bad,
        allow_readable=allow_readable,
    )
    processes = join_processes(device)
    subject = open_subject(
        model,
        data,
        data_root=data_root,
        model_options=model_options if head is None else options_for_features(model, model_options),
        skip_bad=skip_bad,
        tokens=tokens,
        allow_readable=allow_readable,
    )
    outcome = run_ladder(
        subject,
        order,
        processes,
        head=None if head is None else partial(load_head, head),
        own_head=None if attacker_head is None else partial(load_head, attacker_head),
        other=None if other is None else load_model(other, weights=other_weights),
        out=out,
        resume=resume,
        shown=True,
        argv=sys.argv[1:],
        tell=lambda text: typer.echo(text, err=True) if processes.is_main else None,
    )
    if not outcome.is_main or outcome.folder is None:
        return
    folder = outcome.folder.path
    page.write_report([folder], folder / "report.html")
    if as_json:
        running.tell_json(outcome.results, folder)
        return
    told.show_ladder(outcome.results)
    terminal.show_findings(outcome.results["findings"])
    typer.echo(f"report: {folder / 'report.html'}")
    typer.echo(str(folder))


def _count_or_files(text: str) -> int | tuple[str, ...]:
    """A number of token sets to train, or files of sets that are there."""
    return int(text) if text.strip().isdigit() else tuple(part.strip() for part in text.split(",") if part.strip())
