"""Run all checks on a model, and summarize in one sentence whether its robustness numbers can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vitadel.diagnosis.checks import load_checks
from vitadel.diagnosis.examination import Examination, Level, attack_cost
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, Check, Finding, NotExamined
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.opening import Opening, next_command
from vitadel.runtime.progress import progress

__all__ = ["CHECKS", "Check", "Diagnosis", "cost_of", "recommended_command", "run_checks", "summarize"]

CHECKS = load_checks()
_FAILED = "left out: "


@dataclass(frozen=True)
class Diagnosis:
    """Findings in the order of the checks, and which checks do not apply or failed, with the reason."""

    findings: tuple[Finding, ...] = ()
    not_examined: Mapping[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, str]:
        """The checks that ended in an error of the model, with the error."""
        reasons = self.not_examined.items()
        return {check: reason.removeprefix(_FAILED) for check, reason in reasons if reason.startswith(_FAILED)}

    @property
    def worst(self) -> str:
        """The worst verdict; a failed check counts as suspicious."""
        verdicts = {finding.verdict for finding in self.findings} | ({SUSPICIOUS} if self.failed else set())
        return next((verdict for verdict in (BROKEN, SUSPICIOUS) if verdict in verdicts), OK)

    def as_dict(self) -> dict[str, Any]:
        return {"findings": [each.as_dict() for each in self.findings], "not_examined": dict(self.not_examined)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Diagnosis:
        """Read what `as_dict` wrote; checks that have another name in this version are left out, and so run again."""
        known = {check.identifier for check in CHECKS}
        findings = tuple(Finding(**each) for each in saved["findings"] if each["check"] in known)
        return cls(findings, {name: why for name, why in saved["not_examined"].items() if name in known})


def cost_of(level: Level, checks: Sequence[Check] = CHECKS) -> dict[str, Any]:
    """The largest number of gradients and forwards per image, by attack and by check.

    Every attack includes one forward to judge its result. A check that does not apply to the model costs nothing.
    """
    costs = {"clean": (0.0, 1.0)}
    costs |= {name: attack_cost(name) for check in checks for name in check.attacks(level)}
    costs |= {check.identifier: check.own_cost(level) for check in checks if any(check.own_cost(level))}
    rows = [{"name": name, "gradients": float(g), "forwards": float(f)} for name, (g, f) in costs.items()]
    total = {
        "gradients": sum(float(g) for g, _ in costs.values()),
        "forwards": sum(float(f) for _, f in costs.values()),
    }
    return {"images": level.images, "rows": rows, **total}


def run_checks(
    e: Examination,
    checks: Sequence[Check] = CHECKS,
    shown: bool = False,
    *,
    done: Diagnosis | None = None,
    save: Callable[[Diagnosis], None] = lambda diagnosis: None,
) -> Diagnosis:
    """Run the checks in order; once a vital one is broken, the others are left out.

    A check in which the model fails is left out with the reason, unless it is vital. Checks of `done` do not run again;
    `save` receives the state after each check.
    """
    findings, left_out = (list(done.findings), dict(done.not_examined)) if done else ([], {})
    with progress("checks", len(checks), shown) as meter:
        for check in checks:
            if check.identifier not in left_out and all(each.check != check.identifier for each in findings):
                useless = _broken_vital(findings, checks)
                found = _run_check(check, e) if useless is None else f"meaningless while '{useless}' is broken"
                if isinstance(found, Finding):
                    findings.append(found)
                else:
                    left_out[check.identifier] = found
                save(Diagnosis(tuple(findings), left_out))
            meter.advance(1, check.identifier)
    return Diagnosis(tuple(findings), left_out)


def _broken_vital(findings: Sequence[Finding], checks: Sequence[Check]) -> str | None:
    vital = {check.identifier for check in checks if check.vital}
    return next((each.check for each in findings if each.check in vital and each.verdict == BROKEN), None)


def _run_check(check: Check, e: Examination) -> Finding | str:
    """A finding, or why there is none."""
    mode: AbstractContextManager[nn.Module | None] = nullcontext() if check.as_given else frozen(e.model)
    try:
        with mode:
            verdict, evidence = check(e)
    except NotExamined as reason:
        return str(reason)
    except Exception as fault:  # out of memory, or any error of third-party code: other checks may still run
        if check.vital:
            raise
        first_line = str(fault).strip().partition("\n")[0]
        return f"{_FAILED}{type(fault).__name__}: {first_line}"
    advice = "" if verdict == OK else check.explanation.what_to_do
    return Finding(check.identifier, verdict, evidence, advice, check.title)


def _worst_checks(diagnosis: Diagnosis, checks: Sequence[Check]) -> list[Check]:
    """The checks with the worst verdict, if any was raised."""
    raised = {finding.check: finding.verdict for finding in diagnosis.findings if finding.verdict != OK}
    return [check for check in checks if raised.get(check.identifier) == diagnosis.worst]


def summarize(diagnosis: Diagnosis, n: int, checks: Sequence[Check] = CHECKS) -> str:
    """One sentence: whether to trust robustness numbers of this model, and why not."""
    done, failed = len(diagnosis.findings), diagnosis.failed
    raised = sum(finding.verdict != OK for finding in diagnosis.findings)
    if not raised and failed:
        name, fault = next(iter(failed.items()))
        return (
            f"It is unknown whether robustness numbers of this model can be trusted: {len(failed)} of "
            f"{done + len(failed)} checks failed, the first is '{name}' ({fault}); the other {done} raised nothing on "
            f"{n} images."
        )
    if not raised:
        return f"No check speaks against this model's robustness numbers: {done} checks, {n} images."
    first = _worst_checks(diagnosis, checks)[0]
    more = f", and {raised - 1} more" if raised > 1 else ""
    trust = "Do not trust" if diagnosis.worst == BROKEN else "Be careful with"
    return f"{trust} robustness numbers of this model: {first.title} ({first.identifier}: {diagnosis.worst}){more}."


def recommended_command(
    diagnosis: Diagnosis,
    model: str,
    data: str,
    norm: str,
    eps: float,
    checks: Sequence[Check] = CHECKS,
    opening: Opening | None = None,
) -> str:
    """The command to run next: the audit that the worst finding asks for, or `diagnose` again after a repair.

    `opening` is how `diagnose` opened model and images.
    """

    def command(verb: str, *more: str) -> str:
        return next_command(opening or Opening(), verb, model, data, norm, quantity_text(eps), *more)

    worst = _worst_checks(diagnosis, checks)
    if not worst and diagnosis.failed:
        return command("diagnose") + "  # after the repair, or with a smaller --batch-size"
    if not worst:
        return command("audit", "--attacks", "autoattack")
    if worst[0].next is None:
        return command("diagnose") + "  # after the repair"
    return command("audit", "--attacks", worst[0].next)


# Names of earlier versions.
Examined, examine, sentence = Diagnosis, run_checks, summarize
