"""Climb the ladder: every attack of every level at every budget, judged on the same victim and images."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.adapters.robustness_tokens import Tokened
from vitadel.amounts import amount_text
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.attacks.threats import Linf
from vitadel.backbones.classifier import Classifier
from vitadel.data.batches import Batch, batches
from vitadel.errors import Interrupted, Mistake
from vitadel.evaluation.audit import Outcome
from vitadel.evaluation.calibration import CalibrationImages, calibration_images
from vitadel.evaluation.judge import judge
from vitadel.evaluation.ledger import FolderLedger, Piece
from vitadel.evaluation.metering import metered
from vitadel.evaluation.results import Tally
from vitadel.evaluation.stages import Bench, clean_stage, run_stage
from vitadel.evaluation.subject import Subject
from vitadel.instrument.hooks import frozen
from vitadel.ladder.controls import controls
from vitadel.ladder.cost import cost_sentence
from vitadel.ladder.extraction import EXPOSED, Extracted, extract_tokens
from vitadel.ladder.levels import RELEASED_EPS, Arms, Head, Rung, rungs
from vitadel.ladder.order import LadderOrder
from vitadel.ladder.table import LadderTable, ladder_results
from vitadel.ladder.training import CONTROLS, Trainer, read_sets
from vitadel.runtime.draws import Draws
from vitadel.runtime.environment import environment
from vitadel.runtime.processes import Processes
from vitadel.runtime.progress import progress
from vitadel.runtime.rundir import RunFolder, open_run, write_atomically, write_json

__all__ = ["run_ladder"]

VICTIM = "tokens"


def run_ladder(
    subject: Subject,
    order: LadderOrder,
    processes: Processes,
    *,
    head: Head | None = None,
    own_head: Head | None = None,
    other: Classifier | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    shown: bool = False,
    argv: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Climb in a run folder. `head` is the victim's, if not the one that the backbone came with; `own_head` is the
    attacker's (T2), `other` the model of T1."""
    victim = _victim(subject)
    if head is not None:
        subject = dataclasses.replace(subject, model=cast(Classifier, head(victim)))
    indices, mislabelled = subject.selection(order.limit, order.seed, order.skip_bad)
    settings = {
        "model": subject.model_spec,
        "model_fingerprint": subject.model_fingerprint(),
        "data": subject.data_spec,
        "data_fingerprint": subject.data_fingerprint(indices),
        "suite": "ladder",
        "other": None if other is None else other.record.name,
        "own_head": own_head is not None,
        **dataclasses.asdict(order),
        "eps": [amount_text(eps) for eps in order.eps],
    }
    path, words = None if out is None else Path(out), list(argv or sys.argv)
    run = processes.on_main(
        lambda: open_run("audit", subject.model_spec, settings, out=path, resume=resume, argv=words)
    )
    if run.complete:
        return Outcome(json.loads((run.path / "results.json").read_text()), run, processes.is_main)
    arms = Arms(victim.to(processes.device), own_head=own_head, other=other)
    arms = arms if head is None else dataclasses.replace(arms, head=head)
    bench = Bench(
        model=arms.head(victim),
        source=subject.source,
        preprocess=subject.preprocess,
        ledger=FolderLedger(run),
        processes=processes,
        batch_size=order.batch_size,
        seed=order.seed,
        classes=subject.model.record.num_classes,
        skip_bad=order.skip_bad,
        shown=shown,
    )
    try:
        climb = _Climb(bench, subject, order, run, indices)
        arms, witnesses = climb.arm(arms)
        if processes.is_main:
            write_json(run.path / "environment.json", environment(processes.device, processes.count))
        table = climb.all(arms, witnesses, Tally.of_clean(clean_stage(bench, indices), mislabelled), tell)
    except KeyboardInterrupt:
        raise Interrupted(run.path) from None
    results = ladder_results(subject, table, settings)
    if processes.is_main:
        write_atomically(run.path / "samples.parquet", table.samples())
        write_json(run.path / "results.json", results)
        run.finish()
    processes.wait()
    return Outcome(results, run, processes.is_main)


def _victim(subject: Subject) -> Tokened:
    model: object = subject.model
    if not isinstance(model, Tokened):
        raise Mistake(
            f"the ladder judges secret tokens, and '{subject.model_spec}' has none. Give the run folder of `vitadel "
            "harden tokens/...`, or a backbone with --tokens FILE."
        )
    return model


@dataclass(frozen=True, eq=False)
class _Climb:
    bench: Bench
    subject: Subject
    order: LadderOrder
    run: RunFolder
    indices: Tensor
    extracted: dict[str, Extracted] = field(default_factory=dict)

    def arm(self, arms: Arms) -> tuple[Arms, dict[str, nn.Module]]:
        """Train and fit what the chosen levels need; and the control victims, if the paper's setting is among them."""
        order, levels, victim = self.order, self.order.levels, arms.victim
        trainer = Trainer(
            victim,
            order.recipe,
            order.attacker_data,
            self.subject.data_root,
            self.run.path / "sets",
            self.bench.processes,
            self.bench.shown,
        )
        if arms.other is not None:
            _check_classes(arms.other, self.subject.model)
        wanted = {"T3", "T4"} & set(levels)
        surrogates = self._sets(trainer, "surrogate", order.surrogates, 1) if wanted else ()
        more = self._sets(trainer, "bank", order.bank, 101) if "T8" in levels else ()
        for exposed in EXPOSED if "T7" in levels else ():
            self.extracted[exposed] = self._extract(arms, exposed)
        witnesses = self._controls(trainer, arms) if "T2" in levels else {}
        armed = dataclasses.replace(
            arms,
            other=None if arms.other is None else arms.other.to(self.bench.processes.device),
            surrogates=surrogates,
            extracted=tuple((name, each.model) for name, each in self.extracted.items()),
            bank=(victim, *more) if more else (),
        )
        return armed, witnesses

    def _sets(self, trainer: Trainer, name: str, wanted: int | tuple[str, ...], seed: int) -> tuple[Tokened, ...]:
        if not isinstance(wanted, int):
            return read_sets(trainer.victim, wanted, self.order.allow_readable)
        seeds = [self.order.seed + seed + number for number in range(wanted)]
        return tuple(trainer.train(f"{name} {number}", each) for number, each in enumerate(seeds, start=1))

    def _controls(self, trainer: Trainer, arms: Arms) -> dict[str, nn.Module]:
        found = controls(arms.victim, arms.head, self.order.seed + 201)
        for number, (name, changes) in enumerate(CONTROLS.items(), start=202):
            found[name] = arms.head(trainer.train(name, self.order.seed + number, changes))
        return {name: each.to(self.bench.processes.device) for name, each in found.items()}

    def _extract(self, arms: Arms, exposed: str) -> Extracted:
        """By every process for itself: the same seed gives all of them the same tokens."""
        wanted, steps = self.order.extraction
        batch, spec, seed = 16, self.order.attacker_data, self.order.seed + 301
        source, rows = calibration_images(self.subject, self.indices, spec, wanted + batch, seed)
        images = CalibrationImages(
            source, rows, self.bench.preprocess, self.bench.processes.device, self.order.skip_bad
        )
        pixels = torch.cat([x for x, _ in images]).split(batch)
        with progress(f"fit tokens to {exposed}", steps, self.bench.shown and self.bench.processes.is_main) as meter:
            return extract_tokens(
                arms.victim, pixels, exposed, steps=steps, seed=seed, told=lambda step: meter.advance(1), head=arms.head
            )

    def all(
        self, arms: Arms, witnesses: Mapping[str, nn.Module], tally: Tally, tell: Callable[[str], None]
    ) -> LadderTable:
        """Every rung at every budget, the smallest first."""
        if len(tally.index) == 0:
            raise Mistake(
                "no sample could be read, so there is nothing to climb for; see the reasons with --skip-bad off"
            )
        order = self.order
        table = LadderTable(order, tally, arms, self.extracted)
        sets = {f"bank {number}": arms.head(each) for number, each in enumerate(arms.bank[1:], start=2)}
        beside = {**witnesses, **sets}
        for name, model in beside.items():
            bench = dataclasses.replace(self.bench, model=model, classes=None)
            with frozen(model):
                table.clean(name, clean_stage(bench, tally.index, f"clean {name}"))
        crew = rungs(order.levels, arms, order.steps, order.queries, order.white_box)
        (first,) = batches(self.bench.source, [tally.index[: order.batch_size].tolist()], self.bench.preprocess)
        x = first.to(self.bench.processes.device).x
        tell(cost_sentence(crew, order.eps, self.bench.model, x, int(tally.correct.sum())))
        for rung in crew:
            standing = tally.correct
            for eps in order.eps if rung.in_pixels else (RELEASED_EPS,):
                judged = witnesses if rung.level == "T2" else {}
                exposed = torch.ones_like(standing) if judged else standing
                pieces = self._stage(arms, rung, eps, tally.index[exposed], judged)
                held = table.add(rung, eps, pieces, exposed)
                standing = standing & held if rung.asks else standing
                if self.bench.processes.is_main:
                    write_json(self.run.path / "results.json", {"complete": False, "ladder": table.rows})
        return table

    def _stage(
        self, arms: Arms, rung: Rung, eps: float, indices: Tensor, witnesses: Mapping[str, nn.Module]
    ) -> list[Piece]:
        attack, threat, bench = rung.attack(eps), Linf(eps), self.bench
        judges = {VICTIM: bench.model, **witnesses} if rung.judges is None else _named_sets(rung.judges)
        broken = 0

        def work(number: int, batch: Batch) -> Piece:
            draws = Draws.of_samples(bench.seed, batch.indices, bench.processes.device).stream(rung.title)
            with metered(rung.source) as cost:
                z = attack(rung.source, batch.x, batch.y, draws)
            piece = {
                "index": batch.indices.cpu().numpy(),
                "gradients": np.asarray(cost.gradients),
                "forwards": np.asarray(cost.forwards),
            }
            for name, model in judges.items():
                with frozen(model):
                    verdict = judge(model, threat, batch.x, z, batch.y)
                piece[f"right:{name}"] = verdict.held.cpu().numpy()
                piece["void"] = verdict.void.cpu().numpy()
            if rung.features:
                piece |= {
                    f"cosine:{name}": each.cpu().numpy() for name, each in _cosines(arms.victim, batch.x, z).items()
                }
            return piece

        def tell(piece: Piece) -> str:
            nonlocal broken
            broken += int((~np.logical_and.reduce([piece[f"right:{name}"] for name in _deployed(judges)])).sum())
            return f"{broken} wrong"

        title = f"{rung.title} at {amount_text(eps)}"
        return run_stage(bench, title, indices, work, tell)


@torch.no_grad()
def _cosines(victim: Tokened, x: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Attacked features with the tokens, against those of the bare backbone (the paper's text) and against the
    victim's own (the released code), and without tokens; per token, and per channel as in the released code."""
    bare = victim.classifier
    clean, own = final_features(bare, x), final_features(victim, x)
    with_tokens, without = final_features(victim, z), final_features(bare, z)
    pairs = {"to bare": (with_tokens, clean), "to own": (with_tokens, own), "no tokens": (without, clean)}
    axes = ("token", "channel")
    return {f"{name}, {axis}": feature_cosine(*pair, axis) for name, pair in pairs.items() for axis in axes}


def _check_classes(other: nn.Module, victim: Classifier) -> None:
    theirs, ours = getattr(other, "record", victim.record).num_classes, victim.record.num_classes
    if theirs != ours:
        raise Mistake(
            f"the other model has {theirs} classes, the victim {ours}; images crafted on it only say something about "
            "the victim if the classes are the same"
        )


def _named_sets(judges: Sequence[nn.Module]) -> dict[str, nn.Module]:
    return {f"set {number}": model for number, model in enumerate(judges, start=1)}


def _deployed(judges: Mapping[str, nn.Module]) -> list[str]:
    return [VICTIM] if VICTIM in judges else list(judges)
