"""Accuracy against robustness, model beside model, on the same images: what TORA-ViT (Li & Xu, CVPR 2023) is about.

Every head and the joint output under the protocol of RVT, as in the slides; then stronger attacks on what is deployed,
the joint output: attacks on itself, and attacks aimed at either head, each on what those before it left standing.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from vitadel.attacks.branch_attacks import BranchAttack
from vitadel.attacks.parse import make, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import Linf
from vitadel.data.validation import BadSample
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.audit.evidence import findings_about
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.calibration import studies
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, context_for
from vitadel.evaluation.engine.stages import RunContext, attack_stage, clean_stage, rules_of
from vitadel.evaluation.engine.verdicts import Verdicts, described, heading
from vitadel.evaluation.intervals import share
from vitadel.evaluation.trade_off.adapter_maps import look_at_maps
from vitadel.evaluation.trade_off.candidates import JOINT, Candidate, open_contenders
from vitadel.findings import SUSPICIOUS, Finding
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text, read_quantity
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.types import Attack, Source

__all__ = ["SUITE", "TradeOffRequest", "run_trade_off", "trade_off"]

SUITE = "trade-off"
Budgets = float | str | Sequence[float | str]
_MISLED = 0.01  # share of all images that attacks aimed at a head may break beyond those on the joint output


@dataclass(frozen=True)
class TradeOffRequest:
    """What a comparison is asked to do. `attacks` go at the joint output, `aimed` at each head; all are in Linf.

    `maps` is the number of images on which the adapters' maps are drawn and checked.
    """

    eps: tuple[float, ...] = (1 / 255, 2 / 255, 4 / 255)
    attacks: tuple[str, ...] = ("pgd-50(restarts=5)", "autoattack")
    aimed: tuple[str, ...] = ("pgd-50(restarts=5)",)
    maps: int = 0
    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    skip_bad: bool = False

    @classmethod
    def read(
        cls, eps: Budgets, attacks: str | Sequence[str], aimed: str | Sequence[str] | None, **more: Any
    ) -> TradeOffRequest:
        """From lists, or from texts with commas as on the command line; `eps` may be one number, `aimed` nothing."""
        budgets = eps.split(",") if isinstance(eps, str) else [eps] if isinstance(eps, int | float) else eps
        return cls(
            eps=tuple(read_quantity(each, "eps") for each in budgets),
            attacks=tuple(split_attack_list(attacks) if isinstance(attacks, str) else attacks),
            aimed=tuple(split_attack_list(aimed) if isinstance(aimed, str) and aimed else aimed or ()),
            **more,
        )

    def __post_init__(self) -> None:
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
                raise UserError(
                    f"{flag} lists {twice[0]!r} twice; each name may stand once, settings make names differ"
                )
            for name in names:
                _plain(name, make(name, eps=self.eps[0]))
        if self.batch_size < 1 or self.maps < 0:
            raise UserError(
                f"--batch-size must be at least 1 and --maps at least 0, got {self.batch_size} and {self.maps}"
            )


def trade_off(
    runs: str | Path | Sequence[str | Path],
    data: str | Source = "shapes",
    *,
    eps: Budgets = TradeOffRequest.eps,
    attacks: str | Sequence[str] = TradeOffRequest.attacks,
    aimed: str | Sequence[str] | None = TradeOffRequest.aimed,
    knob: int = 0,
    maps: int = 0,
    limit: int | None = None,
    batch_size: int = 64,
    seed: int = 0,
    skip_bad: bool = False,
    device: str = "auto",
    data_root: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """`vitadel trade-off` from Python: run folders of `harden`, or other models, on the same images.

    Writes `out`, or a new run folder below runs/; returns what `results.json` holds.
    """
    request = TradeOffRequest.read(
        eps, attacks, aimed, maps=maps, limit=limit, batch_size=batch_size, seed=seed, skip_bad=skip_bad
    )
    specs = [str(each) for each in ([runs] if isinstance(runs, str | Path) else runs)]
    candidates = open_contenders(specs, data, data_root=data_root, skip_bad=skip_bad, knob=knob)
    return run_trade_off(candidates, request, join_processes(device), out=out, resume=resume).results


def run_trade_off(
    candidates: Sequence[Candidate],
    request: TradeOffRequest,
    processes: Processes,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> Outcome:
    """Judge all contenders in one run folder; every (model, output, budget) is a stage that is found again."""
    candidates = [dataclasses.replace(each, target=choose_among(each.target)) for each in candidates]
    first = candidates[0].target
    indices, mislabelled = first.selection(request.limit, request.seed, request.skip_bad)
    who = [each.told() for each in candidates]
    settings = _settings(candidates, request, who, indices)
    run, done = begun(SUITE, candidates[0].name, settings, processes, out=out, resume=resume, argv=argv)
    if done is not None:
        return done
    context = context_for(first, request, processes, run, shown=shown)
    try:
        judged = []
        for number, candidate in enumerate(candidates, start=1):
            course = _Course(context, request, candidate, f"{number:02d} {candidate.name}")
            judged.append(course.run(indices, mislabelled))
            if processes.is_main:
                told = [_entry(*pair) for pair in zip(who, judged, strict=False)]
                write_json(run.path / "results.json", {"complete": False, "trade_off": {"contenders": told}})
        maps, arrays = look_at_maps(context, candidates, judged[0].joint.index, judged[0].joint.label, request.maps)
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    results = _results(candidates[0], request, judged, who, settings["model_fingerprint"])
    results["trade_off"]["maps"] = maps
    if processes.is_main:
        write_atomically(run.path / "samples.parquet", _samples(judged))
        if arrays is not None:
            write_atomically(run.path / "maps.npz", arrays)
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)


def _settings(
    candidates: Sequence[Candidate], request: TradeOffRequest, who: Sequence[dict[str, Any]], indices: Tensor
) -> dict[str, Any]:
    """What a resumed run must agree with."""
    first = candidates[0].target
    return {
        "model": ", ".join(each.name for each in candidates),
        "model_fingerprint": "-".join(each["fingerprint"] for each in who),
        "data": first.data_spec,
        "data_fingerprint": first.data_fingerprint(indices),
        "suite": SUITE,
        **dataclasses.asdict(request),
        "eps": [quantity_text(eps) for eps in request.eps],
    }


@dataclass
class _Judged:
    """The verdicts on one contender: a tally per output, and what stands at the joint one after each budget."""

    name: str
    tallies: dict[str, Verdicts]
    standing: dict[float, Tensor] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def joint(self) -> Verdicts:
        return self.tallies[JOINT]


@dataclass(frozen=True, eq=False)
class _Course:
    """One contender's way through all stages."""

    context: RunContext
    request: TradeOffRequest
    candidate: Candidate
    title: str

    def run(self, indices: Tensor, mislabelled: Sequence[BadSample]) -> _Judged:
        self.candidate.target.model.to(self.context.processes.device)
        judged = _Judged(self.candidate.name, {})
        for head in (*self.candidate.branches, JOINT):
            model = self.candidate.output(head)
            with frozen(model):
                pieces = clean_stage(self._at(model), indices, f"{self.title} {head} clean")
                judged.tallies[head] = Verdicts.of_clean(pieces, mislabelled)
                if head != JOINT:
                    self._rvt(judged, head)
        if len(judged.joint.index) == 0:
            raise UserError("no sample could be read, so nothing can be judged; see the reasons with --skip-bad off")
        # The smallest budget first: what fools within it fools within every larger one.
        for eps in sorted({RVT.budget, *self.request.eps}):
            if eps == RVT.budget:
                self._rvt(judged, JOINT)
            if eps in self.request.eps:
                self._strong(judged, eps)
                judged.standing[eps] = judged.joint.standing
        return judged

    def _at(self, model: nn.Module) -> RunContext:
        return dataclasses.replace(self.context, model=model)

    def _rvt(self, judged: _Judged, head: str) -> None:
        """Each attack by itself on all images that this output gets right, as in the slides' tables."""
        for name in RVT.attacks:
            self._stage(judged, head, f"RVT {name}", make(name, eps=RVT.budget), RVT.budget, alone=True)

    def _strong(self, judged: _Judged, eps: float) -> None:
        n = len(judged.joint.index)
        for name in self.request.attacks:
            self._stage(judged, JOINT, name, make(name, eps=eps), eps)
        left = int(judged.joint.standing.sum())
        for branch in self.candidate.branches:
            for name in self.request.aimed:
                attack = BranchAttack(make(name, eps=eps), branch)
                self._stage(judged, JOINT, f"{name} aimed at {branch}", attack, eps, target=branch)
        broken = left - int(judged.joint.standing.sum())
        if broken > max(1.0, _MISLED * n):
            judged.findings.append(
                Finding(
                    "branch-attacks",
                    SUSPICIOUS,
                    f"attacks aimed at one head broke {broken} of {n} images that those on the joint output had left",
                    "the joint loss misleads attacks here: trust the worst case only, and aim more attacks at the "
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
        verdicts, model = judged.tallies[head], self.candidate.output(head)
        exposed = verdicts.index[verdicts.correct if alone else verdicts.standing]
        full = f"{name} at {quantity_text(eps)}"
        with frozen(model):
            legs = attack_stage(self._at(model), f"{self.title} {head} {full}", attack, Linf(eps), exposed)
        settings = {**settings_of(attack), "norm": "linf", "eps": quantity_text(eps), "seed": self.request.seed}
        verdicts.add(full, settings, legs, alone=alone, own_rules=False)
        verdicts.entries[-1] |= {"eps": eps, "eps_text": quantity_text(eps), "target": target or head, "attack": name}
        for found in findings_about(full, legs, len(verdicts.index)):
            judged.findings.append({**found, "title": f"{judged.name}: {found['title']}"})


def _plain(name: str, attack: Attack) -> None:
    """An attack with its own rules cannot be ordered by budget, and there are no images here to study."""
    if studies(attack) or rules_of(attack) is not None:
        raise UserError(
            f"'{name}' has a budget of its own or studies other images first, which a trade-off has no room for. Run "
            f"it with `vitadel audit RUN --attacks {name}`."
        )


def _entry(who: dict[str, Any], judged: _Judged) -> dict[str, Any]:
    n = len(judged.joint.index)
    rvt = {
        head: {
            "clean": verdicts.summary()["clean"],
            "attacks": [entry for entry in verdicts.entries if entry["attack"].startswith("RVT ")],
        }
        for head, verdicts in judged.tallies.items()
    }
    return {
        **who,
        "clean": judged.joint.summary()["clean"],
        "rvt": rvt,
        "attacks": [entry for entry in judged.joint.entries if not entry["attack"].startswith("RVT ")],
        "worst_case": [
            {"eps": eps, "eps_text": quantity_text(eps), **share(int(held.sum()), n, "held", "robust_accuracy")}
            for eps, held in judged.standing.items()
        ],
    }


def _results(
    first: Candidate,
    request: TradeOffRequest,
    judged: Sequence[_Judged],
    who: Sequence[dict[str, Any]],
    fingerprint: str,
) -> dict[str, Any]:
    largest = request.eps[-1]
    told = described(first.target, judged[0].joint, fingerprint)
    told["model"] = {"spec": ", ".join(each.name for each in judged), "fingerprint": fingerprint}
    return {
        **heading(request.seed, suite=SUITE),
        **told,
        "threat": {"norm": "linf", "eps": largest, "eps_text": quantity_text(largest)},
        "batch_size": request.batch_size,
        "precision": "fp32",
        "clean": None,  # one of many: all are in trade_off
        "attacks": [],
        "worst_case": None,
        "trade_off": {
            "budgets": [{"eps": eps, "eps_text": quantity_text(eps)} for eps in request.eps],
            "rvt": {"eps": RVT.budget, "eps_text": RVT.eps, "attacks": list(RVT.attacks)},
            "contenders": [_entry(*pair) for pair in zip(who, judged, strict=True)],
        },
        "findings": [found for each in judged for found in each.findings],
    }


def _samples(judged: Sequence[_Judged]) -> bytes:
    """One row per image. For each contender: its answer, whether that is right at every output, held after each attack,
    and by the worst case. There is no one `clean_prediction`; `clean_correct` is right by all."""
    first = judged[0].joint
    columns: dict[str, Any] = {
        "index": first.index.numpy(),
        "label": first.label.numpy(),
        "clean_prediction": pa.nulls(len(first.index), pa.int64()),
        "clean_correct": torch.stack([each.joint.correct for each in judged]).all(0).numpy(),
    }
    for each in judged:
        columns[f"prediction:{each.name}"] = each.joint.prediction.numpy()
        for head, verdicts in each.tallies.items():
            where = "" if head == JOINT else f" {head}"
            columns[f"correct:{each.name}{where}"] = verdicts.correct.numpy()
            columns |= {f"held:{each.name}{where}: {name}": held.numpy() for name, held in verdicts.held.items()}
        for eps, held in each.standing.items():
            columns[f"worst:{each.name}: {quantity_text(eps)}"] = held.numpy()
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
