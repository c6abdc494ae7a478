"""`vitadel inspect`: massive activations layer by layer, clean and attacked, without and with robustness tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vitadel.cli.execution import present, run_options, show_notes
from vitadel.cli.options import (
    DataFlags,
    ModelFlags,
    RunFlags,
    RunOrModel,
    ThreatFlags,
    expand_groups,
    given_flags,
    option,
)


@expand_groups
def inspect(
    ctx: typer.Context,
    model: RunOrModel = "zoo:shapes-robust",
    attack: Annotated[str, option("one attack; see 'vitadel list attacks'")] = "features-30",
    threat: ThreatFlags = ThreatFlags(),
    data: DataFlags = DataFlags("shapes", limit=100, batch_size=32),
    how: ModelFlags = ModelFlags(),
    run: RunFlags = RunFlags(),
) -> None:
    """Measure the largest activations of every layer.

    On clean and attacked images, without and with robustness tokens.
    """
    from vitadel.evaluation.activations import run_inspection

    values = {**asdict(threat), **asdict(data), **asdict(how), "device": run.device}
    outcome = run_inspection(model, attack, values, given_flags(ctx), show_notes=show_notes, **run_options(run))
    present(outcome, run)
