"""`vitadel threat-levels`: secret robustness tokens against attackers who know more at each level, T0 to T8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import open_target, present, run_options
from vitadel.cli.options import DataFlags, ModelFlags, RunFlags, expand_groups, option, split_list
from vitadel.errors import UserError
from vitadel.quantities import read_quantity

if TYPE_CHECKING:
    from vitadel.threat_levels.request import ThreatLevelsRequest


@dataclass(frozen=True)
class LevelFlags:
    """Which levels, and what attackers have at each of them."""

    levels: Annotated[str | None, option("only these, e.g. T2,T3,T6 (default: T0 to T8)")] = None
    eps: Annotated[str | None, option("budgets (default: 1/255,2/255,4/255,8/255)")] = None
    steps: Annotated[int, option("steps of gradient attacks; T2+ also runs four times as many")] = 30
    queries: Annotated[int, option("score queries per image (T5)")] = 5000
    white_box: Annotated[str, option("attacks through the tokens, in addition to pgd (T6)")] = "apgd-ce,apgd-t"
    public: Annotated[str, option("attacks on the backbone without tokens, in addition to pgd (T2)")] = ""
    surrogates: Annotated[str, option("number of token sets that attackers train (T3, T4), or token files")] = "2"
    bank: Annotated[str, option("number of token sets to train for the defender's bank (T8), or token files")] = "2"
    recipe: Annotated[
        str | None, option("how the tokens were trained, NAME or NAME:ROW (default: the run's recipe)")
    ] = None
    attacker_data: Annotated[
        str | None, option("images that attackers train and fit on (default: those of the recipe)")
    ] = None
    head: Annotated[str | None, option("the victim's head, from 'vitadel probe'")] = None
    attacker_head: Annotated[str | None, option("the attacker's own head (T2)")] = None
    other: Annotated[str | None, option("another MODEL for the same classes (T1)")] = None
    other_weights: Annotated[str | None, option("weights of --other")] = None

    def __post_init__(self) -> None:
        if self.other_weights is not None and self.other is None:
            raise UserError("--other-weights are those of another model (T1): name it with --other MODEL")


@expand_groups
def threat_levels(
    model: options.Model = "zoo:shapes-robust",
    flags: LevelFlags = LevelFlags(),
    data: DataFlags = DataFlags("shapes"),
    how: ModelFlags = ModelFlags(),
    run: RunFlags = RunFlags(),
) -> None:
    """Attack a model with secret tokens at levels T0 to T8.

    At each level the attacker knows more, up to the tokens themselves.
    """
    from vitadel.backbones.load import load_model
    from vitadel.heads.linear_probe import load_head
    from vitadel.threat_levels.run import run_threat_levels

    request = _request(model, flags, data, how)
    processes, target = open_target(model, how, data, run.device, for_features=flags.head is not None)
    outcome = run_threat_levels(
        target,
        request,
        processes,
        head=None if flags.head is None else partial(load_head, flags.head),
        own_head=None if flags.attacker_head is None else partial(load_head, flags.attacker_head),
        other=None if flags.other is None else load_model(flags.other, weights=flags.other_weights),
        show_plan=lambda text: typer.echo(text, err=True) if processes.is_main else None,
        **run_options(run),
    )
    present(outcome, run)


def _request(model: str, flags: LevelFlags, data: DataFlags, how: ModelFlags) -> ThreatLevelsRequest:
    from vitadel.adapters.adapted_model import token_run
    from vitadel.attacks.parse import split_attack_list
    from vitadel.backbones.load import has_no_head
    from vitadel.threat_levels.levels import LEVELS
    from vitadel.threat_levels.request import BUDGETS, ThreatLevelsRequest

    trained = token_run(model)
    backbone = model if trained is None else str(trained["name"])
    if flags.head is None and has_no_head(backbone, how.weights or (trained or {}).get("weights")):
        raise UserError(
            f"'{backbone}' has no classifier of its own: train a head by `vitadel probe`, with the tokens, and give it "
            "with --head"
        )
    if trained is None and "/" in model and ":" not in model and not Path(model).exists():
        raise UserError(f"'{model}' does not exist: there is no run folder, and no weight file, of that name")
    return ThreatLevelsRequest(
        eps=BUDGETS if flags.eps is None else tuple(read_quantity(part, "eps") for part in split_list(flags.eps)),
        levels=tuple(LEVELS) if flags.levels is None else split_list(flags.levels.upper()),
        steps=flags.steps,
        queries=flags.queries,
        white_box=tuple(split_attack_list(flags.white_box)) if flags.white_box else (),
        public=tuple(split_attack_list(flags.public)) if flags.public else (),
        surrogates=_count_or_files(flags.surrogates, "--surrogates"),
        bank=_count_or_files(flags.bank, "--bank"),
        recipe=flags.recipe or (None if trained is None else str(Path(model) / "recipe.yaml")),
        attacker_data=flags.attacker_data,
        allow_readable=how.allow_readable,
        **data.for_request(),
    )


def _count_or_files(text: str, flag: str) -> int | tuple[str, ...]:
    """Read a number of token sets to train, or files of sets that exist."""
    if text.strip().isdigit():
        return int(text)
    files = split_list(text)
    if not files or any(_is_number(file) and not Path(file).exists() for file in files):
        raise UserError(f"{flag} is a number of token sets to train, 0 or more, or token files a,b,...; got {text!r}")
    return files


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
