"""Run the threat levels: every attack of every level at every budget, judged on the same victim and images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.threats import Linf
from vitadel.backbones.classifier import Classifier
from vitadel.data.batches import Batch, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.cost import PassTimes
from vitadel.evaluation.engine.expected_time import RunsOnFew, StageCosts, Trial, announce_time
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, run_settings
from vitadel.evaluation.engine.stages import (
    BatchRecord,
    MemoryCache,
    RunContext,
    clean_stage,
    count_passes,
    judge,
    refuse_lost_images,
    run_stage,
)
from vitadel.evaluation.engine.target import Target, apply_class_subset, subset_like
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder
from vitadel.threat_levels.feature_cosines import COSINES_FILE, cosines_table, measured_cosines
from vitadel.threat_levels.levels import RELEASED_EPS, AttackerAssets, Head, LevelAttack, level_attacks
from vitadel.threat_levels.prepare import Prepared, find_victim, open_provided, planned_assets, prepare
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.table import ThreatLevelTable, threat_level_results

VICTIM = "tokens"
_PROBE = 8  # images


def run_threat_levels(
    target: Target,
    request: ThreatLevelsRequest,
    processes: Processes,
    *,
    head: Head | None = None,
    own_head: Head | None = None,
    other: Classifier | None = None,
    show_plan: Callable[[str], None] = lambda text: None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Run all levels. `head` is the victim's, if not the one that the backbone came with; `own_head` is the attacker's
    (T2), `other` the model of T1. `show_plan` gets the expected cost as a sentence."""
    assets = AttackerAssets(find_victim(target, request.levels).to(processes.device), own_head=own_head, other=other)
    opened = target.model_fingerprint()  # as it came: without a head that is put on it here, and with all its classes
    if head is not None:
        assets = dataclasses.replace(assets, head=head)
        target = dataclasses.replace(target, model=cast(Classifier, head(assets.victim)))
    target = apply_class_subset(target)
    assets = _with_class_subset(target.model, assets)
    if not _attacks(request, planned_assets(assets, request)):
        raise UserError(
            f"no attack is available for {', '.join(request.levels)}: T1 needs another model (--other), T3 and T4 "
            "token sets of the attacker (--surrogates), T8 those of a bank (--bank). Give them, or choose other levels."
        )
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    provided = open_provided(target, assets, request, indices, processes)
    if provided.recipe is not None:
        assets = dataclasses.replace(assets, features=provided.recipe.features)

    def fingerprint(model: nn.Module | None) -> str | None:
        """Models and heads by their weights, whatever they are called."""
        if model is None:
            return None
        return dataclasses.replace(target, model=cast(Classifier, model)).model_fingerprint()

    settings = {
        **run_settings(target, request, indices, suite="ladder", other=fingerprint(assets.other)),
        "own_head": fingerprint(None if assets.own_head is None else assets.own_head(assets.victim.classifier)),
        **provided.settings(),
        "opened_fingerprint": opened,
    }

    def work(run: Run) -> dict[str, Any]:
        context = run.context(target, request)
        with frozen(context.model):
            verdicts = Verdicts.from_clean_stage(context, indices, mislabeled)
        show_plan(_expected_cost(context, request, planned_assets(assets, request), verdicts.index))
        prepared = prepare(context, request, assets, provided, RunFolder(run.path))
        runner = _LevelRunner(context, request, run, prepared)
        if run.show_progress and run.expected == {} and not options.get("resume"):
            expected = announce_time(Trial(len(verdicts.index), runner.on_few(verdicts)), processes)
            runner = dataclasses.replace(runner, context=dataclasses.replace(context, expected=expected))
        table = runner.run_all(verdicts)
        run.write("samples.parquet", table.samples())
        if table.cosines:
            run.write(COSINES_FILE, cosines_table(verdicts.index, table.cosines))
        return threat_level_results(target, table, settings)

    # Earlier versions did not record the fingerprint of the model as it was opened.
    not_compared = ("opened_fingerprint",)
    name = target.model_spec
    return execute("audit", name, settings, processes, work, target=target, not_compared=not_compared, **options)


def _attacks(request: ThreatLevelsRequest, assets: AttackerAssets) -> list[LevelAttack]:
    white_box = request.white_box or ()
    return level_attacks(request.levels, assets, request.steps, request.queries, white_box, request.public)


def _with_class_subset(chosen: nn.Module, assets: AttackerAssets) -> AttackerAssets:
    """Restrict the attackers' models to the classes of a benchmark: attackers know that only these are answers."""

    def restrict(head: Head) -> Head:
        return lambda model: subset_like(chosen, head(model))

    return dataclasses.replace(
        assets,
        head=restrict(assets.head),
        own_head=None if assets.own_head is None else restrict(assets.own_head),
        other=None if assets.other is None else subset_like(chosen, assets.other),
    )


def passes_at_most(attacks: Sequence[LevelAttack], budgets: Sequence[float]) -> tuple[int, int]:
    """(gradients, forwards) per image that is robust to everything; judges are not counted."""
    gradients = forwards = 0
    for each in attacks:
        for eps in budgets if each.in_pixels else budgets[:1]:
            more_gradients, more_forwards = each.attack(eps).passes()
            gradients += each.models * more_gradients
            forwards += each.models * more_forwards
    return gradients, forwards


def _expected_cost(context: RunContext, request: ThreatLevelsRequest, assets: AttackerAssets, indices: Tensor) -> str:
    """The plan in a sentence, with the time that a few images take."""
    chunk, device = indices[:_PROBE].tolist(), context.processes.device
    (batch,) = read_batches(context.source, [chunk], context.preprocess, device=device)
    times = PassTimes.measure(context.model, batch.x)
    attacks, budgets, images = _attacks(request, assets), len(request.eps), len(indices)
    gradients, forwards = passes_at_most(attacks, request.eps)
    hours = images * times.seconds(gradients, forwards) / 3600
    time = f"{hours:.1f} hours" if hours >= 1.5 else f"{60 * hours:.0f} minutes"
    return (
        f"{len(attacks)} attacks at {budgets} budget{'s' * (budgets > 1)} on {images} images: at most {gradients} "
        f"gradients and {forwards} forwards per image, {time} on this machine, without the training and fitting of "
        "token sets; images that are broken early cost less"
    )


@dataclass(frozen=True, eq=False)
class _LevelRunner:
    context: RunContext
    request: ThreatLevelsRequest
    run: Run
    prepared: Prepared

    def run_all(self, verdicts: Verdicts) -> ThreatLevelTable:
        """Run every attack at every budget, the smallest first."""
        request, assets, controls = self.request, self.prepared.assets, self.prepared.controls
        table = ThreatLevelTable(request, verdicts, assets, self.prepared.extracted)
        sets = {f"bank {number}": assets.head(each) for number, each in enumerate(assets.bank[1:], start=2)}
        for name, model in {**controls, **sets}.items():
            context = dataclasses.replace(self.context, model=model, classes=None)
            with frozen(model):
                table.add_clean(name, clean_stage(context, verdicts.index, f"clean {name}"))
        for attack in _attacks(request, assets):
            left = verdicts.correct
            for eps in request.eps if attack.in_pixels else (RELEASED_EPS,):
                exposed = torch.ones_like(left) if attack.all_images else left
                records = self._stage(attack, eps, verdicts.index[exposed])
                robust = table.add(attack, eps, records, exposed)
                left = left & robust if attack.queries_victim else left
                self.run.write_unfinished({"ladder": {"rows": table.rows}})
        return table

    def on_few(self, verdicts: Verdicts) -> RunsOnFew:
        """All attacks on a few of the images, in memory."""

        def run(few: int, alone: Processes, *, costs: StageCosts, **folder: Any) -> object:
            shown: dict[str, Any] = {"show_progress": False, "expected": {}, "costs": costs, "processes": alone}
            context = dataclasses.replace(self.context, cache=MemoryCache(), **shown)
            some = Verdicts.from_clean_stage(context, verdicts.index[:few])
            in_memory = Run(None, alone)
            return dataclasses.replace(self, context=context, run=in_memory).run_all(some)

        return run

    def _judges(self, attack: LevelAttack) -> dict[str, nn.Module]:
        if attack.judges is not None:
            return {f"set {number}": model for number, model in enumerate(attack.judges, start=1)}
        return {VICTIM: self.context.model, **(self.prepared.controls if attack.level == "T2" else {})}

    def _stage(self, level_attack: LevelAttack, eps: float, indices: Tensor) -> list[BatchRecord]:
        attack, source, threat = level_attack.attack(eps), level_attack.source, Linf(eps)
        context, judges = self.context, self._judges(level_attack)
        broken = 0

        def work(number: int, batch: Batch) -> BatchRecord:
            refuse_lost_images(batch)
            rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device).stream(level_attack.title)
            with count_passes(source) as cost:
                z = attack(source, batch.x, batch.y, rng)
            record = {
                "index": batch.indices.cpu().numpy(),
                "gradients": np.asarray(level_attack.models * cost.gradients),
                "forwards": np.asarray(level_attack.models * cost.forwards),
            }
            for name, model in judges.items():
                with frozen(model):
                    verdict = judge(model, threat, batch.x, z, batch.y)
                record[f"right:{name}"] = verdict.held.cpu().numpy()
                record["void"] = verdict.void.cpu().numpy()
            if level_attack.features:
                record |= measured_cosines(self.prepared.assets, batch.x, z)
            return record

        def summarize(record: BatchRecord) -> str:
            nonlocal broken
            deployed = [VICTIM] if VICTIM in judges else list(judges)
            broken += int((~np.logical_and.reduce([record[f"right:{name}"] for name in deployed])).sum())
            return f"{broken} wrong"

        stage = f"{level_attack.title} at {quantity_text(eps)}"
        records = run_stage(context, stage, indices, work, summarize)
        if context.costs is not None:
            context.costs.add_attack(stage, attack, records, level_attack.models)
        return records
