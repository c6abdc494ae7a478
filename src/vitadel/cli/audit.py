"""`vitadel audit`: clean accuracy, attacks, worst case; a run folder and a report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitadel.cli import options
from vitadel.cli.execution import audit_request, open_target, present, run_attacks, run_options, submit_jobs
from vitadel.cli.options import (
    AttackFlags,
    ClassifierFlags,
    DataFlags,
    RunFlags,
    expand_groups,
    given_flags,
    option,
    rare,
)
from vitadel.errors import UserError
from vitadel.quantities import WORKERS

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest
    from vitadel.evaluation.engine.run import Outcome

NOT_PASSED = 3
"""The exit code of a run whose results do not pass a gate."""


@dataclass(frozen=True)
class GateFlags:
    """What a pipeline asks for: conditions for the exit code, and a summary."""

    fail_under: Annotated[float | None, option("exit code 3 if the robust interval begins below this (in %)")] = None
    fail_on: Annotated[str | None, option("exit code 3 on such a finding: suspicious or broken")] = None
    summary: Annotated[Path | None, option("also write a short Markdown summary to this file")] = None

    def judge(self) -> Callable[[Outcome], None]:
        """Check the flags, and return what applies them to the results: everything is written before code 3."""
        if self == GateFlags():
            return lambda outcome: None
        from vitadel.reporting.pipeline import Gate, check_summary_file, write_summary

        gate = Gate(self.fail_under, self.fail_on)
        if self.summary is not None:
            check_summary_file(self.summary)

        def apply(outcome: Outcome) -> None:
            if outcome.is_main and self.summary is not None and outcome.folder is not None:
                write_summary(outcome.folder.path, self.summary, gate)
            failures = gate.failures(outcome.results)
            if failures and outcome.is_main:
                reasons = "".join(f"\n  {reason}" for reason in failures)
                typer.echo(f"vitadel: the gate is not passed; the results are written.{reasons}", err=True)
            if failures:
                raise typer.Exit(NOT_PASSED)

        return apply


@expand_groups
def audit(
    ctx: typer.Context,
    model: options.Model = "zoo:shapes-robust",
    attacks: AttackFlags = AttackFlags("autoattack-fast"),
    data: DataFlags = DataFlags("shapes"),
    how: ClassifierFlags = ClassifierFlags(),
    within: Annotated[float | None, option("as many images as +- this many points of the worst case need")] = None,
    compare_with: Annotated[str | None, option("as many images as a decided difference to this run needs")] = None,
    curve: Annotated[bool, option("robust accuracy at every eps, from one run", "--curve")] = False,
    second_phase: Annotated[int | None, option("run the last attack on so many of those left, and estimate")] = None,
    protocol: Annotated[str | None, option("a standard evaluation by name; see 'vitadel list protocols'")] = None,
    suite: Annotated[str | None, option("alias of the verbs corruptions, stability, threat-levels")] = None,
    gates: GateFlags = GateFlags(),
    run: RunFlags = RunFlags(),
    independent: Annotated[bool, rare("run every attack on all correct samples", "--independent")] = False,
    precheck: Annotated[bool, rare("check the model before the attacks")] = True,
    calibration: options.Calibration = None,
    precision: options.Precision = "fp32",
    launcher: options.Launcher = None,
    shard: Annotated[str | None, rare("part I/N of the images; see 'vitadel merge'")] = None,
    workers: Annotated[str, rare("processes that read images")] = "auto",
) -> None:
    """Measure accuracy of MODEL, clean and under attack.

    Each attack runs on samples that earlier ones left correct; writes a run folder and a report.
    """
    assert suite is None  # main.py runs the suite's own verb
    judge, reading = gates.judge(), _read_workers(workers)
    if protocol is not None:
        attacks, data, how, independent = _apply_protocol(protocol, attacks, data, how, independent, given_flags(ctx))
    own: dict[str, object] = {
        "independent": independent,
        "protocol": protocol,
        "calibration": calibration,
        "precision": precision,
    }
    own |= {"within": within, "compare_with": compare_with, "curve": curve or None, "second_phase": second_phase}
    divided = launcher is not None or shard is not None
    if launcher is not None and shard is not None:
        raise UserError("--launcher starts one job for each shard, with its own --shard: leave out one of the two")
    if divided and (curve or second_phase is not None):
        raise UserError("--curve and --second-phase need all images in one place: leave out --shard and --launcher")
    if divided and (within is not None or compare_with is not None):
        raise UserError("--within and --compare-with need all images in one place: leave out --shard and --launcher")
    if compare_with is not None and gates.fail_under is not None:
        raise UserError("the interval of --compare-with ends where the difference is decided: leave out --fail-under")
    threats = [(attacks.norm, attacks.eps)]
    if "," in attacks.norm:
        from vitadel.evaluation.audit.union import split_threats

        threats = split_threats(attacks.norm, attacks.eps)
    requests = [audit_request(replace(attacks, norm=norm, eps=eps), data, **own) for norm, eps in threats]
    if divided and gates != GateFlags():
        raise UserError(
            "a shard has a part of the images, so it cannot be judged: give --fail-under, --fail-on and --summary to "
            "'vitadel merge'"
        )
    if divided and len(requests) > 1:
        raise UserError("--shard takes one threat: audit each norm in shards of its own, with one --out for each")
    if launcher is not None:
        requests[0].make_attacks()  # what is wrong is said here, not in the log of every job
        open_target(model, how, data, "cpu")
        submit_jobs(launcher, run, shards=True)
        return
    if shard is not None:
        _run_shard(shard, requests[0], model, how, data, run, reading)
        return
    outcome = run_attacks("audit", requests, model, how, data, run, precheck=precheck, workers=reading)
    present(outcome, run)
    judge(outcome)


def _read_workers(text: str) -> int | None:
    """A number of reading processes; None for 'auto', as many as are usual on the device."""
    if text == "auto":
        return None
    if not re.fullmatch(r"-?[0-9]{1,9}", text):
        raise UserError(f"--workers must be auto or {WORKERS.words}, got {text!r}")
    return int(text)


def _run_shard(
    shard: str,
    request: AuditRequest,
    model: str,
    how: ClassifierFlags,
    data: DataFlags,
    run: RunFlags,
    workers: int | None,
) -> None:
    from vitadel.evaluation.audit.audit_shards import run_shard
    from vitadel.runtime.run_shards import read_shard

    part = read_shard(shard)
    processes, target = open_target(model, how, data, run.device, notes=True)
    options = run_options(run)
    options["workers"] = workers
    done = run_shard(target, request, processes, part, **options)
    if processes.is_main:
        typer.echo(
            f"shard {part}: {done['images']} images done; when all shards are: vitadel merge {run.out}", err=True
        )
        typer.echo(json.dumps(done, indent=2) if run.as_json else str(run.out))


def _apply_protocol(
    name: str, attacks: AttackFlags, data: DataFlags, how: ClassifierFlags, independent: bool, given: set[str]
) -> tuple[AttackFlags, DataFlags, ClassifierFlags, bool]:
    """Set what the protocol prescribes, except for flags that were given; the audit refuses those that differ."""
    from vitadel.evaluation.audit.protocols import protocol_named, settings

    protocol = protocol_named(name)
    fixed = {flag: value for flag, value in settings(name).items() if flag not in given}
    if "data" not in given:
        if protocol.needs:
            raise UserError(f"the protocol {name} needs --data {protocol.needs}")
        data = replace(data, data=protocol.data[0])
    return (
        replace(attacks, **{flag: fixed[flag] for flag in ("attacks", "eps", "norm") if flag in fixed}),
        data,
        replace(how, **{flag: value for flag, value in protocol.model_options.items() if flag not in given}),
        fixed.get("independent", independent),
    )
