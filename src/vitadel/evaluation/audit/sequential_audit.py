"""Audits that stop when the answer is known: `--within POINTS` and `--compare-with RUN`.

Both look at a growing, class-balanced sample of the images. `--within` goes on until the interval of the worst case is
narrow enough (see `vitadel.sequential`); `--compare-with` until the difference to another run, on the same images, is
decided. Batches do not cross looks, so a look attacks only what it adds; what depends on the whole sample, such as the
sentinels of `autoattack-fast`, is done at each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np
import torch
from torch import Tensor

from vitadel.data.batches import balanced_subset
from vitadel.errors import UserError
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, run_settings
from vitadel.evaluation.engine.stages import Blocks, rules_of
from vitadel.evaluation.engine.target import Target, apply_class_subset
from vitadel.quantities import percent, quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.run_folder import RunFolder
from vitadel.runtime.safe_reading import read_sample_table, validated
from vitadel.sequential import Plan, fixed_size, make_plan, paired_evidence
from vitadel.statistics import share

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest, AuditWork
    from vitadel.evaluation.engine.verdicts import Verdicts

DECISIVE = 20.0
"""Evidence, as a ratio of likelihoods, from which on a difference is decided: chance reaches it in 5 % of the cases."""

_FIRST, _GROWTH = 100, 1.3  # looks of a comparison


class Rule(Protocol):
    """When to stop, and what to report."""

    def first(self) -> int: ...

    def next_look(self, n: int, robust: Mapping[int, bool]) -> int | None:
        """The size of the next sample; None to stop. `robust` are the images of this one."""
        ...

    def summary(self, looks: list[dict[str, Any]], n: int, robust: Mapping[int, bool]) -> dict[str, Any]: ...

    def look(self, n: int, robust: Mapping[int, bool]) -> dict[str, Any]:
        """What is recorded of a look."""
        ...


@dataclass(frozen=True)
class _Within:
    points: float
    plan: Plan
    available: int

    def first(self) -> int:
        return self.plan.looks[0]

    def next_look(self, n: int, robust: Mapping[int, bool]) -> int | None:
        return self.plan.next_look(sum(robust.values()), n)

    def look(self, n: int, robust: Mapping[int, bool]) -> dict[str, Any]:
        held = sum(robust.values())
        return {"n": n, "held": held, "ci95": list(self.plan.interval(held, n))}

    def summary(self, looks: list[dict[str, Any]], n: int, robust: Mapping[int, bool]) -> dict[str, Any]:
        low, high = looks[-1]["ci95"]
        half = 50 * (high - low)
        reached = half <= self.points
        fixed = fixed_size(self.points / 100)
        sentence = f"The interval of the worst case is {half:.2g} points either way"
        times = "1 look" if len(looks) == 1 else f"{len(looks)} looks"
        if reached:
            sentence += f", from {n:,} images at {times}; a sample of a fixed size would need {fixed:,}."
        else:
            sentence += f", and {self.points:g} were asked for: all {n:,} images are used."
        estimator = "Wilson's interval with continuity correction, calibrated for the looks"
        return {
            "rule": "within",
            "points": self.points,
            "reached": reached,
            "estimator": estimator,
            "critical_value": round(self.plan.z, 4),
            "fixed_size": fixed,
            "looks": looks,
            "sentence": sentence,
        }


@dataclass(frozen=True)
class _Comparison:
    name: str
    other: Mapping[int, bool]  # robust in the other run, by index
    available: int

    def first(self) -> int:
        return min(_FIRST, self.available)

    def next_look(self, n: int, robust: Mapping[int, bool]) -> int | None:
        if n >= self.available or paired_evidence(*self._discordant(robust)) >= DECISIVE:
            return None
        return min(math.ceil(_GROWTH * n), self.available)

    def _discordant(self, robust: Mapping[int, bool]) -> tuple[int, int]:
        """How many images are robust here only, and there only."""
        here = sum(held and not self.other[index] for index, held in robust.items())
        there = sum(self.other[index] and not held for index, held in robust.items())
        return here, there

    def look(self, n: int, robust: Mapping[int, bool]) -> dict[str, Any]:
        here, there = self._discordant(robust)
        held = sum(robust.values())
        evidence = paired_evidence(here, there)
        return {"n": n, "held": held, "only_here": here, "only_there": there, "evidence": evidence}

    def summary(self, looks: list[dict[str, Any]], n: int, robust: Mapping[int, bool]) -> dict[str, Any]:
        last = looks[-1]
        decided = last["evidence"] >= DECISIVE
        there = sum(self.other[index] for index in robust)
        verdict = ("more robust" if last["only_here"] > last["only_there"] else "less robust") if decided else None
        shares = f"{percent(last['held'] / n)} here and {percent(there / n)} in {self.name}, of the same {n:,} images"
        counts = f"{last['only_here']} are robust only here, {last['only_there']} only there"
        ending = f"this model is {verdict}" if decided else "which of the two is more robust is not decided"
        return {
            "rule": "compare-with",
            "run": self.name,
            "decided": verdict,
            "estimator": "ratio of likelihoods of the discordant images, valid at every look (Robbins 1970)",
            "other": share(there, n, "held", "robust_accuracy"),
            "looks": looks,
            "sentence": f"Robust are {shares}: {counts}, so {ending} (evidence {last['evidence']:.3g}, "
            f"{DECISIVE:g} decides). Intervals do not allow for stopping when it is decided.",
        }


def _robust_in(path: Path, target: Target, request: AuditRequest) -> dict[int, bool]:
    """Which images withstood all attacks of a finished audit under the same threat and on the same data."""
    folder = RunFolder(path)
    if not folder.complete:
        raise UserError(f"--compare-with {path}: it holds no finished audit")
    other = _read_other(folder.results(), path)
    about, threat = other.data or {}, other.threat or {}
    wanted = {
        "data": (about.get("spec"), target.data_spec),
        "size": (about.get("pixels"), list(target.preprocess.shape)),
        "norm": (threat.get("norm"), request.norm),
        "eps": (threat.get("eps_text"), quantity_text(request.eps)),
        "attacks": ([entry.get("name") for entry in other.attacks or ()], list(request.attacks)),
        "precision": (other.precision, request.precision),
    }
    differing = [f"{what}: {there} there, {here} here" for what, (there, here) in wanted.items() if there != here]
    if differing or not other.worst_case:
        reason = "; ".join(differing) or "it has no worst case"
        raise UserError(f"--compare-with {path} cannot be compared: {reason}. Give an audit by the same attacks.")
    held = [f"held:{entry['name']}" for entry in other.attacks or () if not entry.get("own_rules")]
    table = read_sample_table(path / "samples.parquet", held)
    labels = target.source.labels()
    index = table.column("index").to_pylist()
    known = [int(labels[row]) if 0 <= row < len(labels) else None for row in index]
    if known != table.column("label").to_pylist() or len({*index}) < len(index):
        raise UserError(f"--compare-with {path}: its images and labels are not those of {target.data_spec}")
    robust = np.logical_and.reduce([table.column(name).to_numpy() for name in ("clean_correct", *held)])
    return dict(zip(index, robust.tolist(), strict=True))


@dataclass(frozen=True)
class _Other:
    """The fields of results.json that tell whether an audit can be compared with."""

    data: dict[str, Any] | None = None
    threat: dict[str, Any] | None = None
    attacks: list[dict[str, Any]] | None = None
    precision: str | None = None
    worst_case: dict[str, Any] | None = None


def _read_other(results: Mapping[str, Any], path: Path) -> _Other:
    known = {each.name: results[each.name] for each in fields(_Other) if each.name in results}
    return validated(_Other, known, f"--compare-with: '{path / 'results.json'}'")


def run_sequential_audit(
    target: Target,
    request: AuditRequest,
    processes: Processes,
    check: Callable[[Target, AuditRequest, Tensor, torch.device], None],
    audit: Callable[[Run, Target, AuditRequest, dict[str, Any], Blocks], AuditWork],
    *,
    verb: str,
    examine: Callable[[Target], list[dict[str, Any]]],
    **options: Unpack[RunOptions],
) -> Outcome:
    """Audit a growing sample until the rule that the request names is met; `audit` makes the work of a look."""
    target = apply_class_subset(target)
    rows, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    rule: Rule
    if request.compare_with is not None:
        other = _robust_in(Path(request.compare_with), target, request)
        rows = rows[torch.isin(rows, torch.tensor([*other], dtype=torch.int64))]
        if not len(rows):
            raise UserError(f"--compare-with {request.compare_with}: it has none of the images of this audit")
        rule = _Comparison(Path(request.compare_with).name, other, len(rows))
    else:
        assert request.within is not None
        rule = _Within(request.within, make_plan(request.within, len(rows)), len(rows))
    if not options.get("resume"):
        check(target, request, rows, processes.device)
    settings = run_settings(target, request, rows)
    labels = target.source.labels()[rows]
    batches = math.ceil(len(rows) / request.batch_size)

    def work(run: Run) -> dict[str, Any]:
        growing = _Growing(batches)
        looks: list[dict[str, Any]] = []
        findings = examine(target) if processes.is_main else []
        size: int | None = rule.first()
        while size is not None:
            indices = balanced_subset(labels, size, request.seed, rows)
            blocks = growing.with_look(indices)
            results, verdicts = audit(run, target, request, settings, blocks).judged(
                indices, mislabeled, lambda target: findings
            )
            robust = _by_index(verdicts)
            looks.append(rule.look(size, robust))
            ended, size = size, rule.next_look(size, robust)
        results["sequential"] = rule.summary(looks, ended, robust)
        if request.within is not None:
            last = [entry for entry in results["attacks"] if not entry["own_rules"]][-1]  # the same share
            results["worst_case"]["ci95"] = last["ci95"] = looks[-1]["ci95"]
        return results

    return execute(verb, target.model_spec, settings, processes, work, target=target, **options)


def _by_index(verdicts: Verdicts) -> dict[int, bool]:
    return dict(zip(verdicts.index.tolist(), verdicts.robust.tolist(), strict=True))


@dataclass
class _Growing:
    """The blocks of a growing sample: one for each look, so that later looks leave the batches as they are."""

    batches: int
    parts: list[Tensor] = field(default_factory=list)

    def with_look(self, indices: Tensor) -> Blocks:
        for part in self.parts:
            indices = indices[~torch.isin(indices, part)]
        self.parts.append(indices)
        number = torch.cat([torch.full_like(part, place) for place, part in enumerate(self.parts)])
        index, order = torch.cat(self.parts).sort()
        return Blocks(index, number[order], self.batches)


def check_sequential(request: AuditRequest) -> None:
    """Refuse what cannot be combined with an audit that takes as many images as it needs."""
    flag = "--within" if request.compare_with is None else "--compare-with"
    if any("least_chance" in name for name in request.attacks):
        raise UserError(
            f"{flag} and least_chance of autoattack-fast cannot be combined: nothing is given up here, as that "
            "depends on all images, and each look has others. Leave out least_chance."
        )
    if request.within is not None and request.compare_with is not None:
        raise UserError("--within and --compare-with stop by different rules; give one of them")
    if request.skip_bad:
        raise UserError(f"{flag} and --skip-bad cannot be combined: the looks need every image that they count")
    if request.keep != "nothing":
        raise UserError(f"{flag} keeps no images: what one look saves, the next may not count")
    if request.protocol is not None:
        raise UserError(f"{flag} chooses the number of images, which the protocol {request.protocol} prescribes")
    if request.independent:
        raise UserError(f"{flag} is about the worst case of all attacks; leave out --independent")
    if all(rules_of(attack) is not None for _, attack in request.make_attacks()):
        raise UserError(f"{flag} needs an attack within the budget; all of {', '.join(request.attacks)} have their own")
