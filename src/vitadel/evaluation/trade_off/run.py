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

from vitadel.quantities import amount_text, read_amount
from vitadel.attacks.branch_attacks import Aimed
from vitadel.attacks.parse import make, split_attack_list
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import Linf
from vitadel.data.validation import BadSample
from vitadel.errors import Interrupted, Mistake
from vitadel.evaluation.trade_off.adapter_maps import look_at_maps
from vitadel.evaluation.engine.class_subset import choose_among
from vitadel.evaluation.engine.run import Outcome, begun, bench_for
from vitadel.evaluation.engine.calibration import studies
from vitadel.evaluation.trade_off.candidates import JOINT, Contender, open_contenders
from vitadel.evaluation.audit.evidence import findings_about
from vitadel.evaluation.intervals import share
from vitadel.evaluation.audit.protocols import RVT
from vitadel.evaluation.engine.verdicts import Tally, described, heading
from vitadel.evaluation.engine.stages import Bench, attack_stage, clean_stage, rules_of
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes, join_processes
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.types import Attack, Source

__all__ = ["SUITE", "TradeOffOrder", "run_trade_off", "trade_off"]

SUITE = "trade-off"
Budgets = float | str | Sequence[float | str]
_MISLED = 0.01  # share of all images that attacks aimed at a head may break beyond those on the joint output


@dataclass(frozen=True)
class TradeOffOrder:
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
    ) -> TradeOffOrder:
        """From lists, or from texts with commas as on the command line; `eps` may be one number, `aimed` nothing."""
        budgets = eps.split(",") if isinstance(eps, str) else [eps] if isinstance(eps, int | float) else eps
        return cls(
            eps=tuple(read_amount(each, "eps") for each in budgets),
            attacks=tuple(split_attack_list(attacks) if isinstance(attacks, str) else attacks),
            aimed=tuple(split_attack_list(aimed) if isinstance(aimed, str) and aimed else aimed or ()),
            **more,
        )

    def __post_init__(self) -> None:
        if not self.eps or list(self.eps) != sorted(set(self.eps)) or self.eps[0] <= 0 or self.eps[-1] >= 1:
            raise Mistake(
                f"--eps needs different budgets between 0 and 1, the smallest first, e.g. 1/255,2/255,4/255; got "
                f"{', '.join(map(amount_text, self.eps)) or 'none'}"
            )
        if not self.attacks:
            raise Mistake("a trade-off needs at least one attack on the joint output, e.g. --attacks pgd-20,apgd-ce")
        for flag, names in (("--attacks", self.attacks), ("--aimed", self.aimed)):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise Mistake(f"{flag} lists {twice[0]!r} twice; each name may stand once, settings make names differ")
            for name in names:
                _plain(name, make(name, eps=self.eps[0]))
        if self.batch_size < 1 or self.maps < 0:
            raise Mistake(
                f"--batch-size must be at least 1 and --maps at least 0, got {self.batch_size} and {self.maps}"
            )


def trade_off(
    runs: str | Path | Sequence[str | Path],
    data: str | Source = "shapes",
    *,
    eps: Budgets = TradeOffOrder.eps,
    attacks: str | Sequence[str] = TradeOffOrder.attacks,
    aimed: str | Sequence[str] | None = TradeOffOrder.aimed,
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
    order = TradeOffOrder.read(
        eps, attacks, aimed, maps=maps, limit=limit, batch_size=batch_size, seed=seed, skip_bad=skip_bad
    )
    specs = [str(each) for each in ([runs] if isinstance(runs, str | Path) else runs)]
    contenders = open_contenders(specs, data, data_root=data_root, skip_bad=skip_bad, knob=knob)
    return run_trade_off(contenders, order, join_processes(device), out=out, resume=resume).results


def run_trade_off(
    contenders: Sequence[Contender],
    order: TradeOffOrder,
    processes: Processes,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
) -> Outcome:
    """Judge all contenders in one run folder; every (model, output, budget) is a stage that is found again."""
    contenders = [dataclasses.replace(each, subject=choose_among(each.subject)) for each in contenders]
    first = contenders[0].subject
    indices, mislabelled = first.selection(order.limit, order.seed, order.skip_bad)
    who = [each.told() for each in contenders]
    settings = _settings(contenders, order, who, indices)
    run, done = begun(SUITE, contenders[0].name, settings, processes, out=out, resume=resume, argv=argv)
    if done is not None:
        return done
    bench = bench_for(first, order, processes, run, shown=shown)
    try:
        judged = []
        for number, contender in enumerate(contenders, start=1):
            course = _Course(bench, order, contender, f"{number:02d} {contender.name}")
            judged.append(course.run(indices, mislabelled))
            if processes.is_main:
                told = [_entry(*pair) for pair in zip(who, judged, strict=False)]
                write_json(run.path / "results.json", {"complete": False, "trade_off": {"contenders": told}})
        maps, arrays = look_at_maps(bench, contenders, judged[0].joint.index, judged[0].joint.label, order.maps)
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    results = _results(contenders[0], order, judged, who, settings["model_fingerprint"])
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
    contenders: Sequence[Contender], order: TradeOffOrder, who: Sequence[dict[str, Any]], indices: Tensor
) -> dict[str, Any]:
    """What a resumed run must agree with."""
    first = contenders[0].subject
    return {
        "model": ", ".join(each.name for each in contenders),
        "model_fingerprint": "-".join(each["fingerprint"] for each in who),
        "data": first.data_spec,
        "data_fingerprint": first.data_fingerprint(indices),
        "suite": SUITE,
        **dataclasses.asdict(order),
        "eps": [amount_text(eps) for eps in order.eps],
    }


@dataclass
class _Judged:
    """The verdicts on one contender: a tally per output, and what stands at the joint one after each budget."""

    name: str
    tallies: dict[str, Tally]
    standing: dict[float, Tensor] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def joint(self) -> Tally:
        return self.tallies[JOINT]


@dataclass(frozen=True, eq=False)
class _Course:
    """One contender's way through all stages."""

    bench: Bench
    order: TradeOffOrder
    contender: Contender
    title: str

    def run(self, indices: Tensor, mislabelled: Sequence[BadSample]) -> _Judged:
        self.contender.subject.model.to(self.bench.processes.device)
        judged = _Judged(self.contender.name, {})
        for head in (*self.contender.branches, JOINT):
            model = self.contender.output(head)
            with frozen(model):
                pieces = clean_stage(self._at(model), indices, f"{self.title} {head} clean")
                judged.tallies[head] = Tally.of_clean(pieces, mislabelled)
                if head != JOINT:
                    self._rvt(judged, head)
        if len(judged.joint.index) == 0:
            raise Mistake("no sample could be read, so nothing can be judged; see the reasons with --skip-bad off")
        # The smallest budget first: what fools within it fools within every larger one.
        for eps in sorted({RVT.budget, *self.order.eps}):
            if eps == RVT.budget:
                self._rvt(judged, JOINT)
            if eps in self.order.eps:
                self._strong(judged, eps)
                judged.standing[eps] = judged.joint.standing
        return judged

    def _at(self, model: nn.Module) -> Bench:
        return dataclasses.replace(self.bench, model=model)

    def _rvt(self, judged: _Judged, head: str) -> None:
        """Each attack by itself on all images that this output gets right, as in the slides' tables."""
        for name in RVT.attacks:
            self._stage(judged, head, f"RVT {name}", make(name, eps=RVT.budget), RVT.budget, alone=True)

    def _strong(self, judged: _Judged, eps: float) -> None:
        n = len(judged.joint.index)
        for name in self.order.attacks:
            self._stage(judged, JOINT, name, make(name, eps=eps), eps)
        left = int(judged.joint.standing.sum())
        for branch in self.contender.branches:
            for name in self.order.aimed:
                attack = Aimed(make(name, eps=eps), branch)
                self._stage(judged, JOINT, f"{name} aimed at {branch}", attack, eps, target=branch)
        broken = left - int(judged.joint.standing.sum())
        if broken > max(1.0, _MISLED * n):
            judged.findings.append(
                {
                    "check": f"{judged.name}: the joint output against its heads at {amount_text(eps)}",
                    "verdict": "suspicious",
                    "evidence": f"attacks aimed at one head broke {broken} of {n} images that those on the joint "
                    "output had left",
                    "advice": "the joint loss misleads attacks here: trust the worst case only, and aim more attacks "
                    "at the heads (--aimed)",
                }
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
        tally, model = judged.tallies[head], self.contender.output(head)
        exposed = tally.index[tally.correct if alone else tally.standing]
        full = f"{name} at {amount_text(eps)}"
        with frozen(model):
            legs = attack_stage(self._at(model), f"{self.title} {head} {full}", attack, Linf(eps), exposed)
        settings = {**settings_of(attack), "norm": "linf", "eps": amount_text(eps), "seed": self.order.seed}
        tally.add(full, settings, legs, alone=alone, own_rules=False)
        tally.entries[-1] |= {"eps": eps, "eps_text": amount_text(eps), "target": target or head, "attack": name}
        for found in findings_about(full, legs, len(tally.index)):
            judged.findings.append({**found, "check": f"{judged.name}: {found['check']}"})


def _plain(name: str, attack: Attack) -> None:
    """An attack with its own rules cannot be ordered by budget, and there are no images here to study."""
    if studies(attack) or rules_of(attack) is not None:
        raise Mistake(
            f"'{name}' has a budget of its own or studies other images first, which a trade-off has no room for. Run "
            f"it with `vitadel audit RUN --attacks {name}`."
        )


def _entry(who: dict[str, Any], judged: _Judged) -> dict[str, Any]:
    n = len(judged.joint.index)
    rvt = {
        head: {
            "clean": tally.summary()["clean"],
            "attacks": [entry for entry in tally.entries if entry["attack"].startswith("RVT ")],
        }
        for head, tally in judged.tallies.items()
    }
    return {
        **who,
        "clean": judged.joint.summary()["clean"],
        "rvt": rvt,
        "attacks": [entry for entry in judged.joint.entries if not entry["attack"].startswith("RVT ")],
        "worst_case": [
            {"eps": eps, "eps_text": amount_text(eps), **share(int(held.sum()), n, "held", "robust_accuracy")}
            for eps, held in judged.standing.items()
        ],
    }


def _results(
    first: Contender, order: TradeOffOrder, judged: Sequence[_Judged], who: Sequence[dict[str, Any]], fingerprint: str
) -> dict[str, Any]:
    largest = order.eps[-1]
    told = described(first.subject, judged[0].joint, fingerprint)
    told["model"] = {"spec": ", ".join(each.name for each in judged), "fingerprint": fingerprint}
    return {
        **heading(order.seed, suite=SUITE),
        **told,
        "threat": {"norm": "linf", "eps": largest, "eps_text": amount_text(largest)},
        "batch_size": order.batch_size,
        "precision": "fp32",
        "clean": None,  # one of many: all are in trade_off
        "attacks": [],
        "worst_case": None,
        "trade_off": {
            "budgets": [{"eps": eps, "eps_text": amount_text(eps)} for eps in order.eps],
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
        for head, tally in each.tallies.items():
            where = "" if head == JOINT else f" {head}"
            columns[f"correct:{each.name}{where}"] = tally.correct.numpy()
            columns |= {f"held:{each.name}{where}: {name}": held.numpy() for name, held in tally.held.items()}
        for eps, held in each.standing.items():
            columns[f"worst:{each.name}: {amount_text(eps)}"] = held.numpy()
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()
