"""`vitadel inspect`: massive activations layer by layer, clean and attacked, without and with robustness tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitadel.cli import options, run_verb
from vitadel.cli.flag_groups import bundled, given_flags
from vitadel.cli.run_or_model import (
    Opening,
    RunOrModel,
    open_revisited,
    opened_from_python,
    revisited,
    shared_settings,
)
from vitadel.errors import UserError, nearest_names

if TYPE_CHECKING:
    from torch import nn

    from vitadel.evaluation.engine.run import Outcome

_MODEL, _ATTACK, _IMAGES = "zoo:shapes-robust", "features-30", options.Sampling("shapes", limit=100, batch_size=32)


@bundled
def inspect(
    ctx: typer.Context,
    model: RunOrModel = _MODEL,
    sampling: options.Sampling = _IMAGES,
    attack: Annotated[str, typer.Option(help="one attack, e.g. features-30; see 'vitadel list attacks'")] = _ATTACK,
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Where does a model have its largest activations, and what do attacks and tokens make of them?"""
    from vitadel.reporting import terminal

    opening = Opening(model, sampling, threat, choice)
    outcome = _inspected(opening, given_flags(ctx), attack, run, sys.argv[1:], shown=True)
    run_verb.tell_outcome(outcome, run, terminal.show_activations)


def massive_activations(
    run_or_model: str | Path | nn.Module = _MODEL, *, attack: str = _ATTACK, **settings: Any
) -> dict[str, Any]:
    """`vitadel inspect` from Python: the largest activations of every layer, clean and attacked.

    `run_or_model` is the run folder of an audit, whose model, data, limit, seed, eps and norm are taken, or any model.
    Settings are the command's flags (`data`, `limit`, `tokens`, `out`, ...). Writes `out`, or a new run folder below
    runs/; returns what `results.json` holds.
    """
    opening, run, unknown = opened_from_python(run_or_model, settings, _IMAGES)
    if unknown:
        name = next(iter(unknown))
        raise UserError(f"massive_activations has no setting {name!r}{nearest_names(name, shared_settings()) or '.'}")
    return _inspected(opening, set(settings), attack, run, (), shown=False)[0]


def _inspected(
    opening: Opening, given: set[str], attack: str, run: options.Running, argv: Sequence[str], *, shown: bool
) -> Outcome:
    from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier
    from vitadel.evaluation.activations import ActivationsRequest, inspect_activations
    from vitadel.quantities import read_quantity
    from vitadel.reporting import terminal
    from vitadel.runtime.distributed import join_processes

    opening = revisited(opening, given)
    eps = read_quantity(opening.threat.eps, "eps")
    look = ActivationsRequest(attack, eps, opening.threat.norm, **opening.sampling.for_request())
    processes = join_processes(run.device)
    target = open_revisited(opening, given, for_features=True)
    if shown:
        terminal.tell_notes(target.model.record.notes)
    opened: object = target.model
    if isinstance(opened, TokenBank):
        raise UserError("activations are those of one set of tokens, not of a random one: give one file with --tokens")
    tokened = opened if isinstance(opened, TokenClassifier) else None
    if tokened is not None:
        target = replace(target, model=tokened.classifier)
    return inspect_activations(
        target, tokened, look, processes, out=run.out, resume=run.resume, show_progress=shown, argv=argv
    )
