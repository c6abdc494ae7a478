"""`vitadel inspect`: massive activations layer by layer, clean and attacked, without and with robustness tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated

import typer

from vitadel.cli import options, running
from vitadel.cli.bundles import bundled
from vitadel.cli.revisiting import Opening, RunOrModel, given_flags, open_revisited, revisited
from vitadel.errors import Mistake


@bundled
def inspect(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    sampling: options.Sampling = options.Sampling("shapes", limit=100, batch_size=32),
    attack: Annotated[
        str, typer.Option(help="one attack, e.g. features-30; see 'vitadel list attacks'")
    ] = "features-30",
    threat: options.Threat = options.Threat(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
) -> None:
    """Where does a model have its largest activations, and what do attacks and tokens make of them?"""
    from vitadel.adapters.robustness_tokens import TokenBank, Tokened
    from vitadel.amounts import read_amount
    from vitadel.evaluation.activations import Look, inspect_activations
    from vitadel.reporting import terminal
    from vitadel.runtime.processes import join_processes

    given = given_flags(ctx)
    opening = revisited(Opening(model, sampling, threat, choice), given)
    eps = read_amount(opening.threat.eps, "eps")
    look = Look(attack, eps, opening.threat.norm, **opening.sampling.for_order())
    processes = join_processes(run.device)
    subject = open_revisited(opening, given, for_features=True)
    terminal.tell_notes(subject.model.record.notes)
    opened: object = subject.model
    if isinstance(opened, TokenBank):
        raise Mistake("activations are those of one set of tokens, not of a random one: give one file with --tokens")
    tokened = opened if isinstance(opened, Tokened) else None
    if tokened is not None:
        subject = replace(subject, model=tokened.classifier)
    results, folder = inspect_activations(
        subject, tokened, look, processes, out=run.out, resume=run.resume, shown=True, argv=sys.argv[1:]
    )
    running.tell(results, folder.path, run, terminal.show_activations)
