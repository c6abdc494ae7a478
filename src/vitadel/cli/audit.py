"""`vitadel audit`: clean accuracy, attacks, worst case, or another benchmark; a run folder and a report."""

from __future__ import annotations

from typing import Annotated

import typer

from vitadel.cli import ladder, options, running
from vitadel.cli.bundles import bundled, flags_of
from vitadel.errors import Mistake, nearest_names

_SUITES = {"ladder": ladder.LadderFlags}
_ONLY_OF_ATTACKS = ("attacks", "norm", "independent", "calibration", "precision", "compile_model")


@bundled
def audit(
    ctx: typer.Context,
    model: options.Model = "zoo:shapes-robust",
    sampling: options.Sampling = options.Sampling("shapes"),
    attacking: options.Attacking = options.Attacking("fgsm,pgd-20"),
    independent: Annotated[
        bool, typer.Option("--independent", help="every attack sees all correct samples, not only those still standing")
    ] = False,
    conduct: options.Conduct = options.Conduct(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
    suite: Annotated[
        str | None, typer.Option(help="another benchmark instead of --attacks: ladder, for secret tokens")
    ] = None,
    climbing: ladder.LadderFlags = ladder.LadderFlags(),
) -> None:
    """How accurate is MODEL, and how much of that survives an attack? Writes a run folder and a report."""
    from vitadel.reporting import terminal

    given = {name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    _refuse_idle_flags(suite, given)
    if suite == "ladder":
        eps = attacking.eps if "eps" in given else None  # the ladder has budgets of its own unless told otherwise
        ladder.climb(model, choice, sampling, run, climbing, eps)
        return
    order = running.order_of(attacking, sampling, conduct, independent=independent)
    done = running.run_attacks("audit", order, model, choice, sampling, run)
    if done is not None:
        running.tell(*done, run, terminal.show_results)


def _refuse_idle_flags(suite: str | None, given: set[str]) -> None:
    """Flags that would be ignored: those of a plain audit with a suite, and those of a suite without it."""
    if suite is not None and suite not in _SUITES:
        raise Mistake(f"unknown suite {suite!r}{nearest_names(suite, _SUITES) or '.'} Known: {', '.join(_SUITES)}.")
    if suite is not None:
        idle = [name for name in _ONLY_OF_ATTACKS if name in given]
        why = f"do not go with --suite {suite}, which is Linf in fp32; leave them out."
        _refuse(idle, why)
    for other, flags in _SUITES.items():
        if other != suite:
            _refuse(
                [name for name in flags_of(flags) if name in given], f"need --suite {other}; leave them out, or add it."
            )


def _refuse(idle: list[str], why: str) -> None:
    if idle:
        flags = ", ".join(f"--{name.removesuffix('_model').replace('_', '-')}" for name in idle)
        raise Mistake(f"{flags} {why}")
