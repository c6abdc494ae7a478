"""`--curve`: the smallest known distance of every image, and so robust accuracy at every eps, from one run.

Minimal-norm attacks search the whole box first. The other attacks then confirm at a few budgets, from the largest down:
a point that was found answers for all budgets from its own size on, and an image that withstands a budget is taken to
withstand the smaller ones. So each image is attacked at the largest budget below its distance only. If its distance
is far above that budget, it is left out, but for a random tenth: if any of these is broken, all of them are attacked.
Every point is judged on the deployed model, and its distance measured by the judge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitadel.attacks.parse import entry_of, make, needs_known_family, read_attack_name
from vitadel.attacks.settings import settings_of, training_form
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import Batch
from vitadel.errors import UserError
from vitadel.evaluation.engine.attack_preparation import calibrate
from vitadel.evaluation.engine.stages import NOTE, TOLERANCE, MemberResult, RunContext, Verdict, attack_stage, rules_of
from vitadel.evaluation.engine.verdicts import Verdicts, samples_table
from vitadel.quantities import percent, quantity_text
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import binomial_tail, bootstrap_mean, share
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest, AuditWork
    from vitadel.evaluation.engine.run import Run

FIRST = {"l2": "ddn-100"}
"""The minimal-norm attack of a request that names none, by norm; elsewhere fmn-100."""

LEVELS = (0.25, 0.5, 1.0, 1.5, 2.0)
"""The budgets of the table, in units of eps; other attacks confirm there."""

NEAR = 1.25
"""A distance of at most so many times a budget is near it: attacks at the budget may find a point inside."""

_CHECKED = 0.1  # of the images whose distance is not near
_DISTANCE = "distance"


@dataclass
class Curve:
    """The procedure of an audit with `--curve`; what it finds is kept until the results are written."""

    request: AuditRequest
    distance: Tensor = field(default_factory=lambda: torch.empty(0))
    levels: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        request.check_alone("--curve", "--within", "--compare-with", "--protocol", "--second-phase", "--independent")
        if request.keep != "nothing":
            raise UserError("--curve keeps no images: it records the distance of each; leave out saving them")
        if request.eps == 0:
            raise UserError("--curve needs an eps above 0: the budgets of its table are multiples of it")
        for name, attack in request.make_attacks():
            if rules_of(attack) is not None:
                raise UserError(f"--curve measures distances in {request.norm}, but {name} has its own budget")

    def attack(
        self,
        work: AuditWork,
        context: RunContext,
        verdicts: Verdicts,
        indices: Tensor,
        findings: list[dict[str, Any]],
    ) -> tuple[list[tuple[str, Attack]], list[MemberResult]]:
        """Run the minimal-norm attacks on all correct images, then the others at the budgets of the table."""
        request, names = self.request, self.request.attacks
        minimal = [name for name in names if entry_of(read_attack_name(name)).minimal]
        others = [name for name in names if name not in minimal]
        self.distance = torch.where(verdicts.correct, torch.inf, 0.0).double()
        whole = make_threat(request.norm, _box(request.norm, context.preprocess.shape))
        context = replace(context, save_examples=lambda *judged: _measure(whole, *judged))
        prepared: list[tuple[str, Attack]] = []
        members: list[MemberResult] = []
        for number, name in enumerate([*(minimal or [FIRST.get(request.norm, "fmn-100")]), *others]):
            stage, results = f"{number:02d} {name}", []
            build = _Build(work, context, indices, name)
            if name in others:
                results = self._confirm(context, verdicts, stage, build)
            else:
                attack = training_form(build(whole.eps))
                results = attack_stage(
                    context, stage, attack, whole, verdicts.index[verdicts.correct], needs_known_family(name)
                )
                self._take(verdicts, results)
            settings = {**settings_of(make(name, eps=request.eps, norm=request.norm)), "norm": request.norm}
            settings |= {"eps": work.settings["eps"], "seed": request.seed}
            verdicts.append(name, settings, self._robust(request.eps), results)
            prepared.append((name, make(name, eps=request.eps, norm=request.norm)))
            members += results
        return prepared, members

    def _confirm(self, context: RunContext, verdicts: Verdicts, stage: str, build: _Build) -> list[MemberResult]:
        """Attack at each budget, from the largest down, the images that no larger one answers for."""
        done = torch.zeros(len(self.distance), dtype=torch.bool)
        draws = SampleRNG.of_samples(context.seed, verdicts.index).stream("spot checks").uniform()
        results: list[MemberResult] = []
        for budget in reversed(budgets(self.request, context.preprocess.shape)):
            due = self._robust(budget) & ~done
            near = due & ((self.distance <= NEAR * budget) | self.distance.isinf())
            checked = due & ~near & (draws < _CHECKED)
            threat = make_threat(self.request.norm, budget)

            def run(part: Tensor, title: str, threat: Threat = threat) -> None:
                if not bool(part.any()):
                    return
                attack = build(threat.eps)
                found = attack_stage(context, title, attack, threat, verdicts.index[part], build.needs_known_family)
                self._take(verdicts, found)
                results.extend(found)

            title = f"{stage} at {budget!r}"
            run(near | checked, title)
            broken = checked & ~self._robust(budget)
            if bool(broken.any()):
                run(due & ~near & ~checked, f"{title} all")
            self.levels.append(
                {
                    "attack": build.name,
                    "eps": budget,
                    "near": int(near.sum()),
                    "checked": int(checked.sum()),
                    "broken_checks": int(broken.sum()),
                    "left_out": 0 if bool(broken.any()) else int((due & ~near & ~checked).sum()),
                }
            )
            done |= due & self._robust(budget)
        return results

    def _robust(self, eps: float) -> Tensor:
        return self.distance > eps + TOLERANCE

    def _take(self, verdicts: Verdicts, results: Sequence[MemberResult]) -> None:
        """Keep the smallest distance of each image."""
        order = verdicts.index.argsort()
        for record in (record for member in results for record in member.records):
            index = torch.from_numpy(record["index"].astype(np.int64))
            rows = order[torch.searchsorted(verdicts.index[order], index)]
            new = torch.from_numpy(record[f"{NOTE}{_DISTANCE}"])
            self.distance[rows] = torch.minimum(self.distance[rows], new)

    def finish(self, run: Run, results: dict[str, Any], verdicts: Verdicts) -> dict[str, Any]:
        """The results with the field `curve`; the table of samples gets a column of distances."""
        run.write("samples.parquet", samples_table(verdicts, {_DISTANCE: self.distance}))
        n, shape = len(self.distance), results["data"]["pixels"]
        table = [
            {
                "eps": budget,
                "eps_text": quantity_text(budget),
                **share(int(self._robust(budget).sum()), n, "held", "robust_accuracy"),
            }
            for budget in budgets(self.request, shape)
        ]
        reach = budgets(self.request, shape)[-1]
        shares = (self.distance.clamp(max=reach) / reach).numpy()
        median = _median(self.distance[verdicts.correct].sort().values)
        checked, broken = (sum(level[name] for level in self.levels) for name in ("checked", "broken_checks"))
        passes = sum(2 * entry["gradient_calls"] + entry["forward_calls"] for entry in results["attacks"])
        area = {"up_to": reach, "value": float(shares.mean()), "ci95": list(bootstrap_mean(shares))}
        found = {
            "budgets": table,
            "median_distance": median,
            "area": area,
            "levels": self.levels,
            "spot_checks": {"images": checked, "broken": broken},
            "passes": passes,
        }
        return {**results, "curve": {**found, "sentence": _sentence(found, self.request.norm)}}


@dataclass(frozen=True)
class _Build:
    """Builds an attack for a budget, calibrated where it needs to be."""

    work: AuditWork
    context: RunContext
    indices: Tensor
    name: str

    def __call__(self, eps: float) -> Attack:
        request = self.work.request
        attack = make(self.name, eps=eps, norm=request.norm)
        return calibrate(attack, self.context, self.work.target, self.indices, request.calibration)

    @property
    def needs_known_family(self) -> bool:
        return needs_known_family(self.name)


def _measure(whole: Threat, stage: str, number: int, batch: Batch, z: Tensor, verdict: Verdict) -> dict[str, Tensor]:
    """The judged distance of each proposal: infinite unless it counts as a success."""
    size = whole.size(z.nan_to_num(0.0), batch.x)
    return {_DISTANCE: torch.where(verdict.held, torch.inf, size)}


def _box(norm: str, shape: Sequence[int]) -> float:
    """The budget within which every image of this shape is."""
    values = 3 * math.prod(shape)
    return {"linf": 1.0, "l2": math.sqrt(values)}.get(norm, float(values))


def budgets(request: AuditRequest, shape: Sequence[int]) -> list[float]:
    """The budgets of the table, inside the box; in L0 whole numbers."""
    wanted = [level * request.eps for level in LEVELS]
    if request.norm == "l0":
        wanted = [float(max(1, round(budget))) for budget in wanted]
    return [budget for budget in dict.fromkeys(wanted) if budget < _box(request.norm, shape)]


def _median(ordered: Tensor) -> dict[str, Any]:
    """The median distance of the correctly classified images, with the exact interval of two order statistics."""
    n = len(ordered)
    if n == 0:
        return {"value": None, "ci95": [None, None], "n": 0}
    # The largest rank below which the median lies with a probability of at most 2.5 %.
    rank = bisect_left(range(1, n // 2 + 1), True, key=lambda count: 1 - binomial_tail(count, n, 0.5) > 0.025)
    ends = [float(ordered[rank - 1]), float(ordered[n - rank])] if rank else [0.0, math.inf]
    numbers = [float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2, *ends]
    value, low, high = (number if math.isfinite(number) else None for number in numbers)
    return {"value": value, "ci95": [low, high], "n": n}


def _sentence(found: dict[str, Any], norm: str) -> str:
    median, checks, area = found["median_distance"], found["spot_checks"], found["area"]
    middle = "not known: most were not reached" if median["value"] is None else f"{median['value']:.4g}"
    rows = ", ".join(f"{percent(row['robust_accuracy'])} at {row['eps_text']}" for row in found["budgets"])
    sentence = (
        f"Robust accuracy by the smallest known distance in {norm}: {rows}. The median distance of the correctly "
    )
    sentence += f"classified images is {middle}; the mean of the curve up to {quantity_text(area['up_to'])} is "
    sentence += f"{percent(area['value'])}."
    if checks["images"]:
        sentence += f" Spot checks of images far from a budget: {checks['broken']} of {checks['images']} broken."
    return sentence
