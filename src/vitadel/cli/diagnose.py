"""`vitadel diagnose`: check whether robustness numbers can be trusted; findings with evidence and advice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitadel.cli import options
from vitadel.cli.execution import open_target, present, run_options
from vitadel.cli.options import ClassifierFlags, DataFlags, RunFlags, ThreatFlags, expand_groups, option
from vitadel.quantities import duration, read_quantity

if TYPE_CHECKING:
    from vitadel.diagnosis.checks import Check


@expand_groups
def diagnose(
    model: options.Model = "zoo:shapes-robust",
    level: Annotated[str, option("quick (48 images) or thorough (256, stronger attacks)")] = "quick",
    surrogate: Annotated[str | None, option("MODEL to transfer attacks from (default: a student trained here)")] = None,
    threat: ThreatFlags = ThreatFlags(),
    data: DataFlags = DataFlags("shapes"),
    how: ClassifierFlags = ClassifierFlags(),
    run: RunFlags = RunFlags(),
) -> None:
    """Check whether robustness numbers of MODEL can be trusted.

    Looks for masked gradients, weak attacks and setup errors.
    """
    eps = read_quantity(threat.eps, "eps")  # a mistake in it is reported before torch is loaded
    from vitadel.diagnosis.run import DiagnosisRequest, run_diagnosis

    request = DiagnosisRequest(
        level=level,
        eps=eps,
        norm=threat.norm,
        surrogate=surrogate,
        **data.for_request(),
    )
    processes, target = open_target(model, how, data, run.device, notes=True)
    present(
        run_diagnosis(target, request, processes, show_cost=_show_cost, show_check=_show_check, **run_options(run)), run
    )


def _show_check(check: Check, seconds: float) -> None:
    """Announce a check that takes long."""
    typer.echo(f"{check.identifier}: up to {seconds:.0f} s", err=True)


def _show_cost(cost: Mapping[str, Any]) -> None:
    """Print what a diagnosis takes, on standard error, where it does not mix with results."""
    typer.echo(
        f"likely {duration(cost['seconds_likely'])}, at most {duration(cost['seconds_at_most'])}: {cost['images']} "
        f"images, at most {cost['gradients']:.0f} gradients and {cost['forwards']:.0f} forwards each",
        err=True,
    )
