"""Diagnose a model: open model and data, run the checks, and write the findings to a run folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks.threats import make_threat
from vitadel.diagnosis.checks import BROKEN, OK, SUSPICIOUS, Check, Finding, NotExamined, load_checks
from vitadel.diagnosis.examination import (
    FEWEST,
    Examination,
    Level,
    attack_cost,
    check_enough,
    examination_of,
    examination_of_tensors,
    level_named,
)
from vitadel.errors import UserError
from vitadel.evaluation.engine.cost import PassTimes
from vitadel.evaluation.engine.run import (
    Outcome,
    Run,
    RunOptions,
    RunRequest,
    describe_target,
    execute,
    result_header,
    run_settings,
)
from vitadel.evaluation.engine.target import (
    Target,
    apply_class_subset,
    open_target,
)
from vitadel.findings import attacks_through_modules
from vitadel.instrument.hooks import frozen
from vitadel.quantities import can_diagnose, quantity_text, read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.opening import Opening, next_command
from vitadel.runtime.progress import progress
from vitadel.runtime.run_folder import write_json
from vitadel.runtime.safe_reading import read_json_file
from vitadel.statistics import share

if TYPE_CHECKING:
    from vitadel.evaluation.engine.class_mapping import Classes

__all__ = [
    "CHECKS",
    "Check",
    "Diagnosis",
    "DiagnosisRequest",
    "cost_of",
    "diagnose",
    "examination_of",
    "recommended_command",
    "run_checks",
    "run_diagnosis",
    "summarize",
]

CHECKS = load_checks()
"""Images: a comparison of attacks needs ten that only one of them breaks."""
_UNEXAMINED = "Repair the model, or use a smaller batch_size: a model that cannot be examined cannot be trusted."
_FAILED = "left out: "
_SO_FAR = "findings.json"
_EARLY = 0.1  # share of an attack's passes that a misclassified image costs
_LONG = 10.0  # seconds: checks that may take longer are announced


@dataclass(frozen=True)
class DiagnosisRequest(RunRequest):
    """Settings of a diagnosis, beside model and data; without a `limit` the level sets the number of images."""

    level: str = "quick"
    eps: float = 8 / 255
    norm: str = "linf"
    surrogate: str | None = None

    def __post_init__(self) -> None:
        level_named(self.level)  # report a wrong level, norm or budget before anything is loaded
        super().__post_init__()
        make_threat(self.norm, self.eps)
        if not can_diagnose(self.norm, self.eps):
            raise UserError(
                f"diagnose needs an eps above 0 and, in linf, below 0.5, which can make every image gray; got "
                f"{self.eps:g}. Pixels are in [0, 1]: write 8/255 for 8 levels of 255"
            )
        if self.images < FEWEST:
            raise UserError(f"--limit must be at least {FEWEST}: fewer images prove nothing; got {self.images}")

    @property
    def images(self) -> int:
        return self.depth.images if self.limit is None else self.limit

    @property
    def depth(self) -> Level:
        return level_named(self.level)


def diagnose(
    model: str | nn.Module,
    data: Any = "shapes",
    *,
    level: str = "quick",
    eps: float | str = 8 / 255,
    norm: str = "linf",
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    surrogate: str | nn.Module | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    tokens: str | Path | None = None,
    allow_readable: bool = False,
    classes: Classes | None = None,
    among: str = "all",
) -> list[Finding]:
    """Check whether a robustness number of this model can be trusted: findings with evidence and advice, one per check.

    `data`, `classes` and `among` are those of `audit`. The level `quick` uses 48 images,
    `thorough` 256 and stronger attacks; `limit` overrides the number. `surrogate` is a model to transfer attacks from;
    without one, a small student of the model's outputs is trained if there are images besides the examined ones.
    Modules are returned to their device and modes.
    """
    named = surrogate if isinstance(surrogate, str) else None
    request = DiagnosisRequest(
        level, read_quantity(eps, "eps"), norm, named, limit=limit, batch_size=batch_size, seed=seed
    )
    processes = join_processes(device)
    opening: dict[str, Any] = {"tokens": tokens, "allow_readable": allow_readable}
    with _restored(model), _restored(surrogate):
        if isinstance(data, tuple) and len(data) == 2:
            opened = open_model(model, model_options, **opening) if isinstance(model, str) else model
            x, y = (torch.as_tensor(each) for each in data)
            x = x / 255 if x.dtype == torch.uint8 else x
            e = examination_of_tensors(opened, x, y, request, processes, surrogate)
        else:
            opening |= {"classes": classes, "among": among}
            target = open_target(model, data, data_root=data_root, model_options=model_options, **opening)
            e = examination_of(target, request, processes, surrogate)[0]
        check_enough(len(e.x))
        diagnosis = run_checks(e)
    titles = {check.identifier: check.title for check in CHECKS}
    failed = [
        Finding(name, SUSPICIOUS, {"ended in": fault}, _UNEXAMINED, titles[name])
        for name, fault in diagnosis.failed.items()
    ]
    return [*diagnosis.findings, *failed]


@contextmanager
def _restored(module: object) -> Iterator[None]:
    """Return a module of the caller to its device, and its parts to their modes."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    modes = [part.training for part in parts]
    home = next((weight.device for weight in parts[0].parameters()), None) if parts else None
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        if home is not None:
            parts[0].to(home)


def _expected_cost(e: Examination, times: PassTimes) -> dict[str, Any]:
    """Likely cost and upper bound, from the passes of attacks and checks and the time of one batch on this machine.

    The first attack of the checks, which is not run again, says how many images cost all passes: the robust ones.
    """
    checks = [check for check in CHECKS if e.is_random or not check.if_random]
    cost = cost_of(e.level, checks)
    seconds = len(e.x) * times.seconds(cost["gradients"], cost["forwards"])
    own = [check.own_cost(e.level) for check in checks]
    fixed = len(e.x) * times.seconds(sum(each[0] for each in own), sum(each[1] for each in own))
    share = _EARLY + (1 - _EARLY) * _robust_share(e)
    likely = {"seconds_likely": round(fixed + share * (seconds - fixed), 1)}
    return cost | {"images": len(e.x), **likely, "seconds_at_most": round(seconds, 1)}


def _robust_share(e: Examination) -> float:
    """Of the images, under the attack that most checks compare with; 1 if it cannot run."""
    try:
        with frozen(e.model):
            return float(e.robust(e.level.plain).double().mean())
    except Exception:  # any error of third-party code: the checks report it
        return 1.0


def _most_seconds(check: Check, e: Examination, times: PassTimes) -> float:
    """What a check takes at most, with its attacks that have not run yet."""
    gradients, forwards = check.own_cost(e.level)
    for name in set(check.attacks(e.level)) - e.attacks_done:
        more = attack_cost(name)
        gradients, forwards = gradients + more[0], forwards + more[1]
    return len(e.x) * times.seconds(gradients, forwards)


def run_diagnosis(
    target: Target,
    request: DiagnosisRequest,
    processes: Processes,
    *,
    show_cost: Callable[[Mapping[str, Any]], None] = lambda cost: None,
    show_check: Callable[[Check, float], None] = lambda check, seconds: None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Diagnose a model in a run folder; `show_cost` receives the expected cost before the checks run.

    `show_check` receives each check that is likely to take long, before it runs, with the seconds it takes at most.
    """
    if processes.count > 1:
        raise UserError("diagnose runs in one process; start it without torchrun")
    target = apply_class_subset(target)
    e, batch, mislabeled = examination_of(target, request, processes)
    check_enough(len(e.x))
    settings = run_settings(target, request, batch.indices)

    def work(run: Run) -> dict[str, Any]:
        times = PassTimes.measure(e.model, e.first(min(e.batch_size, len(e.x))))
        cost = _expected_cost(e, times)
        show_cost(cost)

        def announce(check: Check) -> None:
            seconds = _most_seconds(check, e, times)
            if seconds >= _LONG:
                show_check(check, seconds)

        start = time.monotonic()
        so_far = run.path / _SO_FAR
        done = None  # a missing or damaged file: everything is checked again
        with suppress(UserError, LookupError, TypeError, ValueError, AttributeError):
            done = Diagnosis.from_dict(read_json_file(so_far, "the checks so far"))
        diagnosis = run_checks(
            e,
            shown=run.show_progress,
            expected=cost["seconds_likely"],
            done=done,
            announce=announce,
            save=lambda each: write_json(so_far, each.as_dict()),
        )
        cost["seconds"] = round(time.monotonic() - start, 1)
        bad = [dataclasses.asdict(sample) for sample in (*mislabeled, *batch.bad)]
        n, right = len(batch.y), int((e.logits.argmax(1).cpu() == batch.y.cpu()).sum())
        written = diagnosis.as_dict()
        opened = (target.model_spec, target.data_spec, request.norm, request.eps)
        return {
            **result_header(request.seed),
            **describe_target(target, settings["model_fingerprint"], n, bad),
            "threat": {"norm": request.norm, "eps": request.eps, "eps_text": settings["eps"]},
            "batch_size": request.batch_size,
            "clean": share(right, n, "correct", "accuracy"),
            "attacks": [],
            "worst_case": None,
            "findings": written["findings"],
            "diagnosis": {
                "level": request.level,
                "verdict": diagnosis.worst,
                "sentence": summarize(diagnosis, len(e.x)),
                "next": recommended_command(diagnosis, *opened, opening=run.opening),
                "not_examined": written["not_examined"],
                "cost": cost,
            },
        }

    outcome = execute("diagnose", target.model_spec, settings, processes, work, target=target, **options)
    assert outcome.folder is not None
    (outcome.folder.path / _SO_FAR).unlink(missing_ok=True)
    return outcome


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
    attacks = list(dict.fromkeys(name for check in checks for name in check.attacks(level)))
    own = {check.identifier: check.own_cost(level) for check in checks}
    costs = {"clean": (0.0, 1.0)} | {name: attack_cost(name) for name in attacks}
    costs |= {name: cost for name, cost in own.items() if any(cost)}
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
    expected: float | None = None,
    done: Diagnosis | None = None,
    announce: Callable[[Check], None] = lambda check: None,
    save: Callable[[Diagnosis], None] = lambda diagnosis: None,
) -> Diagnosis:
    """Run the checks in order; once a vital one is broken, the others are left out.

    A check in which the model fails is left out with the reason, unless it is vital. All are `expected` to take so
    many seconds. Checks of `done` do not run again; `announce` receives each check before it runs, `save` the state
    after it.
    """
    findings, left_out = (list(done.findings), dict(done.not_examined)) if done else ([], {})
    with progress("checks", len(checks), shown, expected) as meter:
        for check in checks:
            if check.identifier not in left_out and all(each.check != check.identifier for each in findings):
                useless = _broken_vital(findings, checks)
                if useless is None:
                    announce(check)
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
    raised = {finding.check: finding.evidence for finding in diagnosis.findings if finding.verdict != OK}
    return command("audit", "--attacks", attacks_through_modules(raised) or worst[0].next)
