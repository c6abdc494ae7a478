"""The trade-off between accuracy and robustness of several models on the same images (TORA-ViT, Li & Xu, CVPR 2023).

Every head and the joint output are evaluated by the protocol of RVT, as in the slides. Then stronger attacks work on
the joint output, which is deployed: attacks on itself, and attacks aimed at either head, each on the samples that are
still correct after those before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa
import torch
from torch import Tensor, nn

from vitadel.attacks.branch_attacks import BranchAttack
from vitadel.attacks.parse import make, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import Linf
from vitadel.data.batches import BadSample
from vitadel.errors import UserError
from vitadel.evaluation.audit.evidence import findings_about
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.attack_preparation import needs_calibration
from vitadel.evaluation.engine.expected_time import Trial
from vitadel.evaluation.engine.run import (
    Outcome,
    Run,
    RunOptions,
    RunRequest,
    describe_target,
    execute,
    request_from,
    result_header,
    run_settings,
)
from vitadel.evaluation.engine.stages import RunContext, attack_stage, rules_of
from vitadel.evaluation.engine.target import apply_class_subset
from vitadel.evaluation.engine.verdicts import Verdicts, parquet_bytes
from vitadel.evaluation.trade_off.adapter_maps import evaluate_maps
from vitadel.evaluation.trade_off.candidates import JOINT, Candidate, open_candidates
from vitadel.findings import SUSPICIOUS, Finding
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.statistics import share
from vitadel.types import Attack, Source

__all__ = ["SUITE", "TradeOffRequest", "run_trade_off", "trade_off"]

SUITE = "trade-off"
Budgets = float | str | Sequence[float | str]
_MISLED = 0.01  # share of all images that attacks aimed at a head may break beyond those on the joint output


@dataclass(frozen=True)
class TradeOffRequest(RunRequest):
    """What a comparison is asked to do. `attacks` work on the joint output, `aimed` on each head; all are in Linf.

    `maps` is the number of images on which the adapters' maps are drawn and checked.
    """

    eps: tuple[float, ...] = (1 / 255, 2 / 255, 4 / 255)
    attacks: tuple[str, ...] = ("pgd-50(restarts=5)", "autoattack")
    aimed: tuple[str, ...] = ("pgd-50(restarts=5)",)
    maps: int = 0

    @classmethod
    def read(
        cls, eps: Budgets, attacks: str | Sequence[str], aimed: str | Sequence[str] | None, **more: Any
    ) -> TradeOffRequest:
        """A request from lists, or from texts with commas as on the command line; `eps` may be one number."""
        budgets = eps.split(",") if isinstance(eps, str) else [eps] if isinstance(eps, int | float) else eps
        fields = {
            "eps": tuple(read_quantity(each, "eps") for each in budgets),
            "attacks": tuple(split_attack_list(attacks) if isinstance(attacks, str) else attacks),
            "aimed": tuple(split_attack_list(aimed) if isinstance(aimed, str) and aimed else aimed or ()),
        }
        return request_from(cls, "trade_off", fields | more)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.eps or list(self.eps) != sorted(set(self.eps)) or self.eps[0] <= 0 or self.eps[-1] >= 1:
            raise UserError(
                f"--eps needs different budgets between 0 and 1, the smallest first, e.g. 1/255,2/255,4/255; got "
                f"{', '.join(map(quantity_text, self.eps)) or 'none'}"
            )
        if not self.attacks:
            raise UserError("a trade-off needs at least one attack on the joint output, e.g. --attacks pgd-20,apgd-ce")
        for flag, names in (("--attacks", self.attacks), ("--aimed", self.aimed)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise UserError(f"{flag} lists {twice[0]!r} twice; write different settings in brackets: (restarts=2)")
            for name in names:
                _check_plain(name, make(name, eps=self.eps[0]))
        if self.maps < 0:
            raise UserError(f"--maps must be at least 0, got {self.maps}")


def trade_off(
    runs: str | Path | Sequence[str | Path],
    data: str | Source = "shapes",
    *,
    eps: Budgets = TradeOffRequest.eps,
    attacks: str | Sequence[str] = TradeOffRequest.attacks,
    aimed: str | Sequence[str] | None = TradeOffRequest.aimed,
    knob: int = 0,
    crop_pct: float | str | None = None,
    device: str = "auto",
    data_root: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """`vitadel trade-off` from Python: run folders of `harden`, or other models, on the same images.

    `crop_pct` is the share of each image that is kept, if not the models' own: 0.875 in RVT's protocol.
    `settings` are further fields of `TradeOffRequest`: maps, limit, batch_size, seed, skip_bad. Writes `out`, or a new
    run folder below runs/; returns the content of `results.json`.
    """
    request = TradeOffRequest.read(eps, attacks, aimed, **settings)
    specs = [str(each) for each in ([runs] if isinstance(runs, str | Path) else runs)]
    candidates = open_candidates(
        specs,
        data,
        data_root=data_root,
        skip_bad=bool(request.skip_bad),
        knob=knob,
        model_options=crop_option(crop_pct),
    )
    return run_trade_off(candidates, request, join_processes(device), out=out, resume=resume).results


def crop_option(crop_pct: float | str | None) -> dict[str, float] | None:
    """How models are opened for a crop that was asked for."""
    return None if crop_pct is None else {"crop_pct": read_quantity(crop_pct, "--crop-pct")}


def run_trade_off(
    candidates: Sequence[Candidate], request: TradeOffRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Evaluate all candidates in one run folder; every (model, output, budget) is a stage."""
    candidates = [dataclasses.replace(each, target=apply_class_subset(each.target)) for each in candidates]
    first = candidates[0].target
    indices, mislabeled = first.selection(request.limit, request.seed, request.skip_bad)
    described = [each.describe() for each in candidates]
    fingerprint = "-".join(each["fingerprint"] for each in described)
    settings = run_settings(
        first,
        request,
        indices,
        model=", ".join(each.name for each in candidates),
        model_fingerprint=fingerprint,
        suite=SUITE,
    )

    def work(run: Run) -> dict[str, Any]:
        context = run.context(first, request)
        judged: list[_Judged] = []
        for number, candidate in enumerate(candidates, start=1):
            evaluation = _Evaluation(context, request, candidate, f"{number:02d} {candidate.name}")
            judged.append(evaluation.run(indices, mislabeled))
            entries = [_entry(*pair) for pair in zip(described, judged, strict=False)]
            run.write_unfinished({"trade_off": {"contenders": entries}})
        joint = judged[0].joint
        maps, arrays = evaluate_maps(context, candidates, joint.index, joint.label, request.maps)
        run.write("samples.parquet", _samples(judged))
        run.write("maps.npz", arrays)
        results = _results(candidates[0], request, judged, described, fingerprint)
        results["trade_off"]["maps"] = maps
        return results

    def on_few(few: int, alone: Processes, **watched: Any) -> Outcome:
        tried = dataclasses.replace(request, limit=few, maps=min(request.maps, few))
        return run_trade_off(candidates, tried, alone, **watched)

    trial = Trial(len(indices), on_few)
    return execute(SUITE, candidates[0].name, settings, processes, work, trial=trial, **options)


@dataclass
class _Judged:
    """The verdicts on one candidate: one `Verdicts` per output, and the robust samples at each budget."""

    name: str
    verdicts: dict[str, Verdicts]
    robust: dict[float, Tensor] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def joint(self) -> Verdicts:
        return self.verdicts[JOINT]


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """All stages of one candidate."""

    context: RunContext
    request: TradeOffRequest
    candidate: Candidate
    title: str

    def run(self, indices: Tensor, mislabeled: Sequence[BadSample]) -> _Judged:
        self.candidate.target.model.to(self.context.processes.device)
        judged = _Judged(self.candidate.name, {})
        for head in (*self.candidate.branches, JOINT):
            model = self.candidate.output(head)
            with frozen(model):
                stage = f"{self.title} {head} clean"
                judged.verdicts[head] = Verdicts.from_clean_stage(self._at(model), indices, mislabeled, stage)
                if head != JOINT:
                    self._rvt(judged, head)
        # The smallest budget first: an image that fools within it fools within every larger one.
        for eps in sorted({RVT.budget, *self.request.eps}):
            if eps == RVT.budget:
                self._rvt(judged, JOINT)
            if eps in self.request.eps:
                self._strong(judged, eps)
                judged.robust[eps] = judged.joint.robust
        return judged

    def _at(self, model: nn.Module) -> RunContext:
        return dataclasses.replace(self.context, model=model)

    def _rvt(self, judged: _Judged, head: str) -> None:
        """Each attack alone on all images that this output classifies correctly, as in the slides' tables."""
        for name in RVT.attacks:
            self._stage(judged, head, f"RVT {name}", make(name, eps=RVT.budget), RVT.budget, alone=True)

    def _strong(self, judged: _Judged, eps: float) -> None:
        n = len(judged.joint.index)
        for name in self.request.attacks:
            self._stage(judged, JOINT, name, make(name, eps=eps), eps)
        left = int(judged.joint.robust.sum())
        for branch in self.candidate.branches:
            for name in self.request.aimed:
                attack = BranchAttack(make(name, eps=eps), branch)
                self._stage(judged, JOINT, f"{name} aimed at {branch}", attack, eps, target=branch)
        broken = left - int(judged.joint.robust.sum())
        if broken > max(1.0, _MISLED * n):
            judged.findings.append(
                Finding(
                    "branch-attacks",
                    SUSPICIOUS,
                    f"attacks aimed at one head broke {broken} of {n} images that those on the joint output had not",
                    "the joint loss misleads attacks here: trust only the worst case, and aim more attacks at the "
                    "heads (--aimed)",
                    f"{judged.name}: attacks on one head find more than those on the joint output at "
                    f"{quantity_text(eps)}",
                ).as_dict()
            )

    def _stage(
        self,
        judged: _Judged,
        head: str,
        name: str,
        attack: Attack,
        eps: float,
        *,
        target: str | None = None,
        alone: bool = False,
    ) -> None:
        verdicts, model = judged.verdicts[head], self.candidate.output(head)
        exposed = verdicts.index[verdicts.correct if alone else verdicts.robust]
        full = f"{name} at {quantity_text(eps)}"
        with frozen(model):
            members = attack_stage(self._at(model), f"{self.title} {head} {full}", attack, Linf(eps), exposed)
        settings = {**settings_of(attack), "norm": "linf", "eps": quantity_text(eps), "seed": self.request.seed}
        verdicts.add(full, settings, members, alone=alone, own_rules=False)
        verdicts.entries[-1] |= {"eps": eps, "eps_text": quantity_text(eps), "target": target or head, "attack": name}
        for found in findings_about(full, members, len(verdicts.index)):
            judged.findings.append({**found, "title": f"{judged.name}: {found['title']}"})


def _check_plain(name: str, attack: Attack) -> None:
    """Refuse attacks with rules of their own, which have no budget to sort by, and those that need calibration."""
    if needs_calibration(attack) or rules_of(attack) is not None:
        raise UserError(
            f"'{name}' has a budget of its own or needs calibration images, which a trade-off does not support. Run it "
            f"with `vitadel audit RUN --attacks {name}`."
        )


def _entry(candidate: dict[str, Any], judged: _Judged) -> dict[str, Any]:
    n = len(judged.joint.index)
    rvt = {
        head: {
            "clean": verdicts.summary()["clean"],
            "attacks": [entry for entry in verdicts.entries if entry["attack"].startswith("RVT ")],
        }
        for head, verdicts in judged.verdicts.items()
    }
    return {
        **candidate,
        "clean": judged.joint.summary()["clean"],
        "rvt": rvt,
        "attacks": [entry for entry in judged.joint.entries if not entry["attack"].startswith("RVT ")],
        "worst_case": [
            {"eps": eps, "eps_text": quantity_text(eps), **share(int(held.sum()), n, "held", "robust_accuracy")}
            for eps, held in judged.robust.items()
        ],
    }


def _results(
    first: Candidate,
    request: TradeOffRequest,
    judged: Sequence[_Judged],
    candidates: Sequence[dict[str, Any]],
    fingerprint: str,
) -> dict[str, Any]:
    largest = request.eps[-1]
    joint = judged[0].joint
    described = describe_target(first.target, fingerprint, len(joint.index), joint.bad)
    described["model"] = {"spec": ", ".join(each.name for each in judged), "fingerprint": fingerprint}
    return {
        **result_header(request.seed, suite=SUITE),
        **described,
        "threat": {"norm": "linf", "eps": largest, "eps_text": quantity_text(largest)},
        "batch_size": request.batch_size,
        "precision": "fp32",
        "clean": None,  # one of many: all are in trade_off
        "attacks": [],
        "worst_case": None,
        "trade_off": {
            "budgets": [{"eps": eps, "eps_text": quantity_text(eps)} for eps in request.eps],
            "rvt": {"eps": RVT.budget, "eps_text": RVT.eps, "attacks": list(RVT.attacks)},
            "contenders": [_entry(*pair) for pair in zip(candidates, judged, strict=True)],
        },
        "findings": [found for each in judged for found in each.findings],
    }


def _samples(judged: Sequence[_Judged]) -> bytes:
    """One row per image. For each candidate: its prediction, whether that is correct at every output, after each attack
    and in the worst case. `clean_prediction` is empty; `clean_correct` means correct by all candidates."""
    first = judged[0].joint
    columns: dict[str, Any] = {
        "index": first.index,
        "label": first.label,
        "clean_prediction": pa.nulls(len(first.index), pa.int64()),
        "clean_correct": torch.stack([each.joint.correct for each in judged]).all(0),
    }
    for each in judged:
        columns[f"prediction:{each.name}"] = each.joint.prediction
        for head, verdicts in each.verdicts.items():
            where = "" if head == JOINT else f" {head}"
            columns[f"correct:{each.name}{where}"] = verdicts.correct
            columns |= {f"held:{each.name}{where}: {name}": held for name, held in verdicts.held.items()}
        for eps, held in each.robust.items():
            columns[f"worst:{each.name}: {quantity_text(eps)}"] = held
    return parquet_bytes(columns)
