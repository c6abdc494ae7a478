"""Climb the ladder: every attack of every level at every budget, judged on the same victim and images."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.adapters.tokens.token_classifier import TokenBank, TokenClassifier
from vitadel.attacks.features import feature_cosine, final_features
from vitadel.attacks.threats import Linf
from vitadel.backbones.classifier import Classifier
from vitadel.data.batches import Batch, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.batch_cache import BatchRecord
from vitadel.evaluation.engine.class_subset import apply_class_subset, subset_like
from vitadel.evaluation.engine.judge import judge
from vitadel.evaluation.engine.pass_counter import count_passes
from vitadel.evaluation.engine.run import Outcome, Run, RunOptions, execute, run_settings
from vitadel.evaluation.engine.stages import RunContext, clean_stage, refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import Verdicts
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import RunFolder
from vitadel.threat_levels.cost import cost_sentence
from vitadel.threat_levels.levels import RELEASED_EPS, AttackerAssets, Head, Rung, rungs
from vitadel.threat_levels.prepare import Armed, arm, gather, planned
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.table import LadderTable, ladder_results

__all__ = ["run_ladder"]

VICTIM = "tokens"

_COSINES = {"tokens": {"token": "token", "channel": "channel"}, "pooled": {"token": "pooled"}}
"""Kind of features -> the axes that they are compared along, and how these cosines are called."""


def run_ladder(
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
    arms = AttackerAssets(_victim(target).to(processes.device), own_head=own_head, other=other)
    opened = target.model_fingerprint()  # as it came: without a head that is put on it here, and with all its classes
    if head is not None:
        arms = dataclasses.replace(arms, head=head)
        target = dataclasses.replace(target, model=cast(Classifier, head(arms.victim)))
    target = apply_class_subset(target)
    arms = _all_choosing_like(target.model, arms)
    _refuse_idle(request, arms)
    indices, mislabeled = target.selection(request.limit, request.seed, request.skip_bad)
    supplies = gather(target, arms, request, indices, processes)
    if supplies.recipe is not None:
        arms = dataclasses.replace(arms, features=supplies.recipe.features)

    def fingerprint(model: nn.Module | None) -> str | None:
        """Models and heads by their weights, whatever they are called."""
        if model is None:
            return None
        return dataclasses.replace(target, model=cast(Classifier, model)).model_fingerprint()

    settings = {
        **run_settings(target, request, indices, suite="ladder", other=fingerprint(arms.other)),
        "own_head": fingerprint(None if arms.own_head is None else arms.own_head(arms.victim.classifier)),
        **supplies.settings(),
        "opened_fingerprint": opened,
    }

    def work(run: Run) -> dict[str, Any]:
        context = run.context(target, request)
        with frozen(context.model):
            verdicts = Verdicts.from_clean_stage(context, indices, mislabeled)
        show_plan(_expected_cost(context, request, planned(arms, request), verdicts.index))
        armed = arm(context, request, arms, supplies, RunFolder(run.path))
        table = _Climb(context, request, run, armed).all(verdicts)
        run.write("samples.parquet", table.samples())
        return ladder_results(target, table, settings)

    # Earlier versions did not record the fingerprint of the model as it was opened.
    not_compared = ("opened_fingerprint",)
    name = target.model_spec
    return execute("audit", name, settings, processes, work, target=target, not_compared=not_compared, **options)


def _victim(target: Target) -> TokenClassifier:
    model: object = target.model
    if isinstance(model, TokenBank):
        raise UserError(
            "the ladder judges one set of secret tokens, and a bank of them at T8: give one file with --tokens, and "
            "the others with --bank."
        )
    if not isinstance(model, TokenClassifier):
        raise UserError(
            f"the ladder judges secret tokens, and '{target.model_spec}' has none. Give the run folder of `vitadel "
            "harden tokens/...`, or a backbone with --tokens FILE."
        )
    return model


def _refuse_idle(request: ThreatLevelsRequest, arms: AttackerAssets) -> None:
    """Of several levels, one without its means is left out and told; but there must be something to climb."""
    if not rungs(request.levels, planned(arms, request), request.steps, request.queries, request.white_box):
        raise UserError(
            f"nobody is there to climb {', '.join(request.levels)}: T1 needs another model (--other), T3 and T4 token "
            "sets of the attacker (--surrogates), T8 those of a bank (--bank). Give them, or choose other levels."
        )


def _all_choosing_like(chosen: nn.Module, arms: AttackerAssets) -> AttackerAssets:
    """On a benchmark of some classes, attackers know that only these are answers, and their models choose alike."""

    def choosing(head: Head) -> Head:
        return lambda model: subset_like(chosen, head(model))

    return dataclasses.replace(
        arms,
        head=choosing(arms.head),
        own_head=None if arms.own_head is None else choosing(arms.own_head),
        other=None if arms.other is None else subset_like(chosen, arms.other),
    )


def _expected_cost(context: RunContext, request: ThreatLevelsRequest, arms: AttackerAssets, indices: Tensor) -> str:
    (first,) = read_batches(context.source, [indices[: request.batch_size].tolist()], context.preprocess)
    crew = rungs(request.levels, arms, request.steps, request.queries, request.white_box)
    return cost_sentence(crew, request.eps, context.model, first.to(context.processes.device).x, len(indices))


@dataclass(frozen=True, eq=False)
class _Climb:
    context: RunContext
    request: ThreatLevelsRequest
    run: Run
    armed: Armed

    def all(self, verdicts: Verdicts) -> LadderTable:
        """Every rung at every budget, the smallest first."""
        request, arms, witnesses = self.request, self.armed.arms, self.armed.witnesses
        table = LadderTable(request, verdicts, arms, self.armed.extracted)
        sets = {f"bank {number}": arms.head(each) for number, each in enumerate(arms.bank[1:], start=2)}
        for name, model in {**witnesses, **sets}.items():
            context = dataclasses.replace(self.context, model=model, classes=None)
            with frozen(model):
                table.clean(name, clean_stage(context, verdicts.index, f"clean {name}"))
        for rung in rungs(request.levels, arms, request.steps, request.queries, request.white_box):
            standing = verdicts.correct
            for eps in request.eps if rung.in_pixels else (RELEASED_EPS,):
                exposed = torch.ones_like(standing) if rung.all_images else standing
                pieces = self._stage(rung, eps, verdicts.index[exposed])
                held = table.add(rung, eps, pieces, exposed)
                standing = standing & held if rung.asks else standing
                self.run.write_unfinished({"ladder": {"rows": table.rows}})
        return table

    def _judges(self, rung: Rung) -> dict[str, nn.Module]:
        if rung.judges is not None:
            return {f"set {number}": model for number, model in enumerate(rung.judges, start=1)}
        return {VICTIM: self.context.model, **(self.armed.witnesses if rung.level == "T2" else {})}

    def _stage(self, rung: Rung, eps: float, indices: Tensor) -> list[BatchRecord]:
        attack, threat, context, judges = rung.attack(eps), Linf(eps), self.context, self._judges(rung)
        broken = 0

        def work(number: int, batch: Batch) -> BatchRecord:
            refuse_lost_images(batch)
            rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device).stream(rung.title)
            with count_passes(rung.source) as cost:
                z = attack(rung.source, batch.x, batch.y, rng)
            piece = {
                "index": batch.indices.cpu().numpy(),
                "gradients": np.asarray(rung.models * cost.gradients),
                "forwards": np.asarray(rung.models * cost.forwards),
            }
            for name, model in judges.items():
                with frozen(model):
                    verdict = judge(model, threat, batch.x, z, batch.y)
                piece[f"right:{name}"] = verdict.held.cpu().numpy()
                piece["void"] = verdict.void.cpu().numpy()
            if rung.features:
                moved = _cosines(self.armed.arms, batch.x, z)
                piece |= {f"cosine:{name}": each.cpu().numpy() for name, each in moved.items()}
            return piece

        def tell(piece: BatchRecord) -> str:
            nonlocal broken
            deployed = [VICTIM] if VICTIM in judges else list(judges)
            broken += int((~np.logical_and.reduce([piece[f"right:{name}"] for name in deployed])).sum())
            return f"{broken} wrong"

        return run_stage(context, f"{rung.title} at {quantity_text(eps)}", indices, work, tell)


@torch.no_grad()
def _cosines(arms: AttackerAssets, x: Tensor, z: Tensor) -> dict[str, Tensor]:
    """Attacked features with the tokens, against those of the bare backbone (the paper's text) and against the
    victim's own (the released code), and without tokens; per token, and per channel as in the released code; of
    pooled features, too, where the defence compares those."""
    victim, bare = arms.victim, arms.victim.classifier
    found: dict[str, Tensor] = {}
    for kind in dict.fromkeys(("tokens", arms.features)):
        clean, own = final_features(bare, x, kind), final_features(victim, x, kind)
        with_tokens, without = final_features(victim, z, kind), final_features(bare, z, kind)
        pairs = {"to bare": (with_tokens, clean), "to own": (with_tokens, own), "no tokens": (without, clean)}
        for axis, called in _COSINES[kind].items():
            found |= {f"{name}, {called}": feature_cosine(*pair, axis) for name, pair in pairs.items()}
    return found
