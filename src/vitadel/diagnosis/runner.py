"""The doctor: runs all checks on a model, and says in one sentence whether its robustness numbers can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from vitadel.attacks.parse import make
from vitadel.diagnosis.checks import attention as attention
from vitadel.diagnosis.checks import gradients as slopes
from vitadel.diagnosis.checks import masking as masking
from vitadel.diagnosis.checks import pixels_and_outputs as outputs
from vitadel.diagnosis.checks import randomness as randomness
from vitadel.diagnosis.checks import search_strength as strength
from vitadel.diagnosis.examination import Examination, Level
from vitadel.diagnosis.finding import (
    BROKEN,
    OK,
    SUSPICIOUS,
    Explanation,
    Finding,
    NotExamined,
    Outcome,
    explanation_of,
)
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.opening import Opening, next_command
from vitadel.runtime.progress import progress

__all__ = ["CHECKS", "Check", "Examined", "cost_of", "examine", "recommended_command", "sentence"]


@dataclass(frozen=True)
class Check:
    """A check and what it costs.

    `attacks` names the attacks it compares, which are run once for all checks; `own` is what it takes besides, in
    (gradients, forwards) per image. `as_given`: it looks at the model in the mode it came in; all others see it in eval
    mode. `vital`: without it nothing after it means anything. `if_random`: it applies to models that answer at random
    only. `next` are the attacks to run when it is raised.
    """

    name: str
    run: Callable[[Examination], Outcome]
    own: Callable[[Level], tuple[float, float]]
    attacks: Callable[[Level], tuple[str, ...]] = lambda level: ()
    as_given: bool = False
    vital: bool = False
    if_random: bool = False
    next: str | None = None

    @property
    def explanation(self) -> Explanation:
        return explanation_of(self.run)


def _fixed(gradients: float, forwards: float) -> Callable[[Level], tuple[float, float]]:
    return lambda level: (gradients, forwards)


def _judged(attack: str) -> tuple[float, float]:
    """What a check's own attack takes, and its judge."""
    gradients, forwards = make(attack).passes()
    return gradients, forwards + 1


CHECKS: tuple[Check, ...] = (
    Check("pixel range", outputs.pixel_range, _fixed(0, 0), vital=True),
    Check("finite outputs", outputs.finite_outputs, _fixed(0, 1), vital=True),
    Check("evaluation mode", randomness.evaluation_mode, _fixed(0, 0.5), as_given=True),
    Check("normalisation", outputs.normalisation, _fixed(0, 6.4)),
    Check("clean accuracy", outputs.clean_accuracy, _fixed(0, 0), vital=True),
    Check("outputs are logits", outputs.probabilities, _fixed(0, 0)),
    Check("same answer twice", randomness.same_answer_twice, _fixed(0, 1.75), next="autoattack-rand"),
    Check("same answer in any batch", randomness.batch_composition, _fixed(0, 0.6)),
    Check("same answer with gradients", outputs.gradient_mode, _fixed(0, 0.5), next="square"),
    Check("answers without gradients", outputs.answers_by_search, _fixed(0, 0.1), next="square"),
    Check("eps 0 is clean", outputs.eps_zero, _fixed(3, 1)),
    Check("gradients are there", slopes.gradients_there, _fixed(2, 0), next="cw-100,square"),
    Check("gradients reach", slopes.vanishing, _fixed(1, 0), next="square,aas+pgd-100"),
    Check(
        "gradients are true",
        slopes.finite_differences,
        lambda level: (0.25, 0.5 + 0.5 * level.directions),
        next="square",
    ),
    Check("same gradient twice", slopes.same_gradient_twice, _fixed(0.5, 0), next="eot:20+pgd-100,square"),
    Check("no staircase", slopes.staircase, _fixed(0, 0.75), next="square"),
    Check("gradients lead uphill", slopes.uphill, _fixed(1, 2), next="square"),
    Check(
        "many steps beat one",
        masking.single_step,
        _fixed(2, 2),
        lambda level: (level.plain,),
        next="pgd-100(restarts=5)",
    ),
    Check(
        "more steps",
        strength.more_steps,
        lambda level: _judged(level.longer),  # the finer ones
        lambda level: (level.plain, level.longer),
        next="apgd-ce",
    ),
    Check(
        "more restarts",
        strength.more_restarts,
        _fixed(0, 0),
        lambda level: (level.plain, level.restarted),
        next="autoattack",
    ),
    Check(
        "a huge eps breaks everything",
        strength.unbounded_eps,
        lambda level: _judged(level.plain),
        next="square,apgd-t",
    ),
    Check(
        "other losses do no better",
        strength.loss_choice,
        _fixed(0, 0),
        lambda level: (level.plain, *level.other_losses),
        next="apgd-t,mifpe-100",
    ),
    Check(
        "gradients beat noise",
        masking.random_noise,
        _fixed(0, 0),
        lambda level: (level.plain, level.noise),
        next="square",
    ),
    Check(
        "gradients beat queries",
        masking.black_box,
        _fixed(0, 0),
        lambda level: (level.plain, level.margin, level.square),
        next="autoattack",
    ),
    Check(
        "gradients beat transfer",
        masking.transfer,
        lambda level: (0, level.steps + masking.LESSONS / level.images),
        lambda level: (level.plain, level.margin),
        next="autoattack",
    ),
    Check("attention is not saturated", attention.attention_saturation, _fixed(0, 0.25), next="aas+pgd-100"),
    Check(
        "softened attention does no better",
        attention.attention_scaling,
        attention.cost_of_scaling,
        lambda level: (level.restarted,),
        next="aas+gama-100",
    ),
    Check(
        "averaging does no better",
        randomness.eot_gap,
        lambda level: _judged(level.eot),
        lambda level: (level.plain,),
        if_random=True,
        next="autoattack-rand",
    ),
)


def cost_of(level: Level, checks: Sequence[Check] = CHECKS) -> dict[str, Any]:
    """The most (gradients, forwards) that one image can cost, attack by attack and check by check.

    One further forward per attack is the judge's. A check that does not apply to the model costs nothing.
    """
    names = dict.fromkeys(name for check in checks for name in check.attacks(level))
    rows = [{"name": "clean", "gradients": 0.0, "forwards": 1.0}]
    for name in names:
        taken, asked = make(name).passes()
        rows.append({"name": name, "gradients": float(taken), "forwards": float(asked + 1)})
    for check in checks:
        gradients, forwards = check.own(level)
        if gradients or forwards:
            rows.append({"name": check.name, "gradients": float(gradients), "forwards": float(forwards)})
    total = {key: sum(float(str(row[key])) for row in rows) for key in ("gradients", "forwards")}
    return {"images": level.images, "rows": rows, **total}


@dataclass(frozen=True)
class Examined:
    """What came of a visit: findings in the order of the catalogue, and which checks had nothing to say, and why."""

    findings: tuple[Finding, ...]
    not_examined: Mapping[str, str]

    @property
    def failed(self) -> dict[str, str]:
        """The checks that ended in an error of the model's, and which: not known is not good."""
        told = self.not_examined.items()
        return {check: reason.removeprefix(_FAILED) for check, reason in told if reason.startswith(_FAILED)}

    @property
    def worst(self) -> str:
        verdicts = {finding.verdict for finding in self.findings}
        return next(
            (verdict for verdict in (BROKEN, SUSPICIOUS) if verdict in verdicts), SUSPICIOUS if self.failed else OK
        )


_NOTHING_YET = Examined((), {})
_FAILED = "left out: "


def examine(
    e: Examination,
    checks: Sequence[Check] = CHECKS,
    shown: bool = False,
    *,
    done: Examined = _NOTHING_YET,
    keep: Callable[[Examined], None] = lambda examined: None,
) -> Examined:
    """Run the checks one after the other; after a vital one is broken, the others are left out.

    A check that a model fails in is left out with the reason, unless it is vital. What is `done` is not run again, and
    `keep` is given what there is after each check.
    """
    findings, left_out = list(done.findings), dict(done.not_examined)
    useless = _broken_vital(findings, checks)
    with progress("checks", len(checks), shown) as meter:
        for check in checks:
            if check.name not in left_out and all(finding.check != check.name for finding in findings):
                found = _found(check, e) if useless is None else f"means nothing while '{useless}' is broken"
                if isinstance(found, Finding):
                    findings.append(found)
                else:
                    left_out[check.name] = found
                useless = _broken_vital(findings, checks)
                keep(Examined(tuple(findings), left_out))
            meter.advance(1, check.name)
    return Examined(tuple(findings), left_out)


def _broken_vital(findings: Sequence[Finding], checks: Sequence[Check]) -> str | None:
    vital = {check.name for check in checks if check.vital}
    return next((each.check for each in findings if each.check in vital and each.verdict == BROKEN), None)


def _found(check: Check, e: Examination) -> Finding | str:
    """A finding, or why there is none."""
    try:
        return _finding(check, e)
    except NotExamined as reason:
        return str(reason)
    except Exception as fault:  # out of memory, or whatever a foreign model has against it: other checks may do
        if check.vital:
            raise
        first_line = str(fault).strip().partition("\n")[0]
        return f"{_FAILED}{type(fault).__name__}: {first_line}"


def _finding(check: Check, e: Examination) -> Finding:
    mode: AbstractContextManager[nn.Module | None] = nullcontext() if check.as_given else frozen(e.model)
    with mode:
        verdict, evidence = check.run(e)
    return Finding(check.name, verdict, evidence, "" if verdict == OK else check.explanation.what_to_do)


def sentence(examined: Examined, n: int, checks: Sequence[Check] = CHECKS) -> str:
    """Trust it, or why not."""
    raised = [finding for finding in examined.findings if finding.verdict != OK]
    if not raised and examined.failed:
        name, fault = next(iter(examined.failed.items()))
        done, failed = len(examined.findings), len(examined.failed)
        return (
            f"Whether to trust robustness numbers of this model cannot be told: {failed} of {done + failed} checks "
            f"failed, the first '{name}' ({fault}); the other {done} raised nothing on {n} images."
        )
    if not raised:
        return f"Nothing speaks against this model's robustness numbers: {len(examined.findings)} checks, {n} images."
    worst = [finding for finding in raised if finding.verdict == examined.worst]
    first = next(check for check in checks if check.name == worst[0].check)
    more = f", and {len(raised) - 1} more" if len(raised) > 1 else ""
    told = "Do not trust" if examined.worst == BROKEN else "Be careful with"
    why = first.explanation.raised_if.split(". ")[0].removesuffix(".")
    return f"{told} robustness numbers of this model: '{first.name}' is {examined.worst} ({why}){more}."


def recommended_command(
    examined: Examined,
    model: str,
    data: str,
    norm: str,
    eps: float,
    checks: Sequence[Check] = CHECKS,
    opening: Opening | None = None,
) -> str:
    """What to type next: the audit that the worst finding asks for, or `diagnose` again after a repair.

    `opening` is how `diagnose` opened model and images, to open them in the same way again.
    """

    def following(verb: str, *more: str) -> str:
        return next_command(opening or Opening(), verb, model, data, norm, quantity_text(eps), *more)

    raised = {finding.check: finding.verdict for finding in examined.findings if finding.verdict != OK}
    worst = [check for check in checks if raised.get(check.name) == examined.worst]
    if not worst and examined.failed:
        return following("diagnose") + "  # after the repair, or with a smaller --batch-size"
    if not worst:
        return following("audit", "--attacks", "autoattack")
    if worst[0].next is None:
        return following("diagnose") + "  # after the repair"
    return following("audit", "--attacks", worst[0].next)
