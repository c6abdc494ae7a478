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
    steps: Annotated[int, option("steps of attacks; T2+ also four times as many")] = 30
    queries: Annotated[int, option("score queries per image (T5)")] = 5000
    white_box: Annotated[str | None, option("more attacks at T6 (default: apgd-ce,apgd-t)")] = None
    public: Annotated[str, option("more attacks at T2, without the tokens")] = ""
    surrogates: Annotated[str, option("token sets of attackers (T3, T4): a number, or files")] = "2"
    bank: Annotated[str, option("token sets of the bank (T8): a number, or files")] = "2"
    guess: Annotated[str | None, option("numbers of tokens that attackers try (T3, T4, T7): 5,20")] = None
    recipe: Annotated[str | None, option("how tokens were trained, NAME[:ROW] (default: the run's)")] = None
    attacker_data: Annotated[str | None, option("images of attackers (default: those of the recipe)")] = None
    head: Annotated[str | None, option("the victim's head: a run of 'probe', or its file")] = None
    features: Annotated[bool, option("features only (T0, T2, T6), also without a head")] = False
    attacker_head: Annotated[str | None, option("the attacker's own head (T2)")] = None
    other: Annotated[str | None, option("another MODEL for the same classes (T1)")] = None
    other_weights: Annotated[str | None, option("weights of --other")] = None

    def __post_init__(self) -> None:
        if self.features and (self.head or self.attacker_head or self.other):
            raise UserError("--features judges features alone: leave out --head, --attacker-head and --other")
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
    without_head = flags.features or flags.head is not None
    processes, target = open_target(model, how, data, run.device, for_features=without_head)
    if flags.features:
        from vitadel.threat_levels.feature_levels import run_feature_levels

        present(run_feature_levels(target, request, processes, **run_options(run)), run)
        return
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
    from vitadel.backbones.load import has_no_head
    from vitadel.threat_levels.levels import LEVELS
    from vitadel.threat_levels.request import BUDGETS, ThreatLevelsRequest

    trained = token_run(model)
    backbone = model if trained is None else str(trained["name"])
    if (
        flags.head is None
        and not flags.features
        and has_no_head(backbone, how.weights or (trained or {}).get("weights"))
    ):
        raise UserError(
            f"'{backbone}' has no classifier of its own: train a head by `vitadel probe`, with the tokens, and give it "
            "with --head; or judge its features alone with --features"
        )
    if trained is None and "/" in model and ":" not in model and not Path(model).exists():
        raise UserError(f"'{model}' does not exist: there is no run folder, and no weight file, of that name")
    return ThreatLevelsRequest(
        eps=BUDGETS if flags.eps is None else tuple(read_quantity(part, "eps") for part in split_list(flags.eps)),
        levels=tuple(LEVELS) if flags.levels is None else split_list(flags.levels.upper()),
        steps=flags.steps,
        queries=flags.queries,
        white_box=None if flags.white_box is None else _attacks(flags.white_box),
        public=_attacks(flags.public),
        surrogates=_count_or_files(flags.surrogates, "--surrogates"),
        bank=_count_or_files(flags.bank, "--bank"),
        recipe=flags.recipe or (None if trained is None else str(Path(model) / "recipe.yaml")),
        attacker_data=flags.attacker_data,
        guess=() if flags.guess is None else tuple(map(_number_of_tokens, split_list(flags.guess))),
        allow_readable=how.allow_readable,
        features_only=flags.features,
        **data.for_request(),
    )


def _attacks(text: str) -> tuple[str, ...]:
    from vitadel.attacks.parse import split_attack_list

    return tuple(split_attack_list(text)) if text else ()


def _count_or_files(text: str, flag: str) -> int | tuple[str, ...]:
    """Read a number of token sets to train, or files of sets that exist."""
    if text.strip().isdigit():
        return int(text)
    files = split_list(text)
    if not files or any(_is_number(file) and not Path(file).exists() for file in files):
        raise UserError(f"{flag} is a number of token sets to train, 0 or more, or token files a,b,...; got {text!r}")
    return files


def _number_of_tokens(text: str) -> int:
    if not text.isdigit():
        raise UserError(f"--guess takes numbers of tokens, such as 5,20; got {text!r}")
    return int(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
