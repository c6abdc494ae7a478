"""`vitadel audit`: clean accuracy, attacks, worst case, or another benchmark; a run folder and a report."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from vitadel.cli import corruptions, options, run_verb, stability, threat_levels
from vitadel.cli.flag_groups import bundled, flags_of, given_flags, spelled
from vitadel.errors import UserError, nearest_names

_OF_ATTACKS = (
    "attacks",
    "eps",
    "norm",
    "independent",
    "doctor",
    "protocol",
    "calibration",
    "precision",
    "compile_model",
)
# Other benchmarks: their own flags, and which of those of the attacks they heed.
_SUITES = {
    "ladder": (threat_levels.LadderFlags, {"eps"}),
    "corruptions": (corruptions.CorruptionFlags, {"precision"}),
    "stability": (stability.StabilityFlags, {"calibration"}),
}


@bundled
def audit(
    ctx: typer.Context,
    model: options.Model = "zoo:shapes-robust",
    sampling: options.Sampling = options.Sampling("shapes"),
    attacking: options.Attacking = options.Attacking("fgsm,pgd-20"),
    independent: Annotated[
        bool, typer.Option("--independent", help="every attack sees all correct samples, not only those still standing")
    ] = False,
    doctor: Annotated[
        bool, typer.Option(help="look at outputs, gradients and attention first; see 'vitadel diagnose'")
    ] = True,
    protocol: Annotated[
        str | None,
        typer.Option(help="a name that makes runs comparable, e.g. robustbench-cifar10; see 'vitadel list protocols'"),
    ] = None,
    conduct: options.Conduct = options.Conduct(),
    choice: options.Choice = options.Choice(),
    run: options.Running = options.Running(),
    suite: Annotated[
        str | None,
        typer.Option(
            help="another benchmark instead of --attacks: corruptions, stability (noise in patches), or ladder (secret "
            "tokens)"
        ),
    ] = None,
    corrupting: corruptions.CorruptionFlags = corruptions.CorruptionFlags(),
    measuring: stability.StabilityFlags = stability.StabilityFlags(),
    climbing: threat_levels.LadderFlags = threat_levels.LadderFlags(),
) -> None:
    """How accurate is MODEL, and how much of that survives an attack? Writes a run folder and a report."""
    from vitadel.reporting import terminal

    given = given_flags(ctx)
    _refuse_idle_flags(suite, given)
    if suite == "ladder":
        eps = attacking.eps if "eps" in given else None  # the ladder has budgets of its own unless told otherwise
        threat_levels.climb(model, choice, sampling, run, climbing, eps)
    elif suite == "corruptions":
        corruptions.run_corruptions(model, choice, sampling, run, corrupting, conduct.precision)
    elif suite == "stability":
        stability.measure(model, choice, sampling, run, measuring, conduct.calibration)
    else:
        words: list[str] = []
        if protocol is not None:
            attacking, sampling, independent = _under(protocol, attacking, sampling, independent, given)
            choice, words = _opened_under(protocol, choice, given)
        request = run_verb.request_of(attacking, sampling, conduct, independent=independent, protocol=protocol)
        done = run_verb.run_attacks("audit", request, model, choice, sampling, run, doctor=doctor, unsaid=words)
        if done is not None:
            run_verb.tell(*done, run, terminal.show_results)


def _under(
    name: str, attacking: options.Attacking, sampling: options.Sampling, independent: bool, given: set[str]
) -> tuple[options.Attacking, options.Sampling, bool]:
    """What a protocol asks for, where no flag says otherwise; a flag that does is for the audit to refuse."""
    from vitadel.evaluation.audit.protocols import protocol_named, settings

    asked = {flag: value for flag, value in settings(name).items() if flag not in given}
    if "data" not in given:
        protocol = protocol_named(name)
        if protocol.needs:
            raise UserError(f"the protocol {name} needs --data {protocol.needs}")
        sampling = replace(sampling, data=protocol.data[0])
    fixed = {flag: asked[flag] for flag in ("attacks", "eps", "norm") if flag in asked}
    return replace(attacking, **fixed), sampling, asked.get("independent", independent)


def _opened_under(name: str, choice: options.Choice, given: set[str]) -> tuple[options.Choice, list[str]]:
    """How a protocol wants the model opened, likewise, and the flags that would have said so."""
    from vitadel.evaluation.audit.protocols import protocol_named

    asked = {flag: value for flag, value in protocol_named(name).model_options.items() if flag not in given}
    return replace(choice, **asked), [f"{spelled(flag)}={value}" for flag, value in asked.items()]


def _refuse_idle_flags(suite: str | None, given: set[str]) -> None:
    """Flags that would be ignored: those of a plain audit with a suite, and those of a suite without it."""
    if suite is not None:
        if suite not in _SUITES:
            raise UserError(
                f"unknown suite {suite!r}{nearest_names(suite, _SUITES) or '.'} Known: {', '.join(_SUITES)}."
            )
        _, heeded = _SUITES[suite]
        idle = [name for name in _OF_ATTACKS if name in given and name not in heeded]
        _refuse(idle, f"do not go with --suite {suite}, which has attacks and budgets of its own; leave them out.")
    for other, (flags, _) in _SUITES.items():
        if other != suite:
            idle = [name for name in flags_of(flags) if name in given]
            _refuse(idle, f"need --suite {other}; leave them out, or add it.")


def _refuse(idle: list[str], why: str) -> None:
    if idle:
        flags = ", ".join(map(spelled, idle))
        raise UserError(f"{flags} {why}")
