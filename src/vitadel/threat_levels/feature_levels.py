"""Threat levels without a classifier: how far attacks move the features of a backbone, with and without its tokens.

For DINOv2 and OpenCLIP, whose features the paper compares (tables 2 and 3), and for any other model.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import numpy as np

from vitadel.attacks.threats import Linf
from vitadel.data.batches import Batch
from vitadel.evaluation.engine.run import (
    Outcome,
    Run,
    RunOptions,
    describe_target,
    execute,
    result_header,
    run_settings,
)
from vitadel.evaluation.engine.stages import BatchRecord, breaks_rules, count_passes, refuse_lost_images, run_stage
from vitadel.evaluation.engine.target import Target
from vitadel.evaluation.engine.verdicts import costs_of
from vitadel.instrument.hooks import frozen
from vitadel.quantities import quantity_text
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_mean
from vitadel.threat_levels.feature_cosines import COSINES_FILE, cosine_columns, cosines_table, measured_cosines
from vitadel.threat_levels.levels import RELEASED_EPS, AttackerAssets, LevelAttack, level_attacks
from vitadel.threat_levels.prepare import find_victim
from vitadel.threat_levels.request import ThreatLevelsRequest
from vitadel.threat_levels.table import attack_name, fields_of
from vitadel.threat_levels.token_training import read_recipe

SUITE = "feature-levels"


def run_feature_levels(
    target: Target, request: ThreatLevelsRequest, processes: Processes, **options: Unpack[RunOptions]
) -> Outcome:
    """Run the attacks that move features, of every level that is asked for, and measure cosines of all images.

    The head of the model, if it has one, is not used.
    """
    kind = "tokens" if request.recipe is None else read_recipe(request.recipe).features
    victim = find_victim(target, request.levels).to(processes.device)
    assets = AttackerAssets(victim, features=kind)
    indices, _ = target.selection(request.limit, request.seed, request.skip_bad)
    settings = run_settings(target, request, indices, suite=SUITE)

    def work(run: Run) -> dict[str, Any]:
        context = dataclasses.replace(run.context(target, request), model=victim, classes=None)
        rows, cosines = list[dict[str, Any]](), dict[str, Any]()
        index = indices.numpy()
        for attack in level_attacks(request.levels, assets, request.steps, request.queries, ()):
            for eps in () if not attack.features else request.eps if attack.in_pixels else (RELEASED_EPS,):

                def move(number: int, batch: Batch, attack: LevelAttack = attack, eps: float = eps) -> BatchRecord:
                    refuse_lost_images(batch)
                    rng = SampleRNG.of_samples(request.seed, batch.indices, processes.device).stream(attack.title)
                    with count_passes(attack.source) as cost, frozen(attack.source):
                        z = attack.attack(eps)(attack.source, batch.x, batch.y, rng)
                    counts = {"gradients": np.asarray(cost.gradients), "forwards": np.asarray(cost.forwards)}
                    with frozen(victim):
                        moved = measured_cosines(assets, batch.x, z)
                    void = breaks_rules(Linf(eps), batch.x, z).cpu().numpy()
                    return {"index": batch.indices.cpu().numpy(), "void": void, **counts, **moved}

                records = run_stage(context, f"{attack.title} at {quantity_text(eps)}", indices, move)
                row = _row(attack, eps, records)
                rows.append(row)
                cosines[attack_name(row)] = cosine_columns(records)
                index = np.concatenate([record["index"] for record in records])
        run.write(COSINES_FILE, cosines_table(index, cosines))
        return {
            **result_header(request.seed, suite=SUITE),
            **describe_target(target, settings["model_fingerprint"], len(index), ()),
            "batch_size": request.batch_size,
            "feature_levels": {
                "tokens": len(victim.tokens) if victim.enabled else 0,
                "fingerprint": victim.fingerprint if victim.enabled else None,
                "features": kind,
                "rows": rows,
            },
            "findings": [],
        }

    return execute("threat-levels", target.model_spec, settings, processes, work, target=target, **options)


def _row(attack: LevelAttack, eps: float, records: list[BatchRecord]) -> dict[str, Any]:
    columns = cosine_columns(records)
    return {
        **fields_of(attack, eps),
        "n": len(next(iter(columns.values()))),
        "cosines": {
            name: {
                "mean": float(values.mean(dtype=np.float64)),
                "sd": float(values.std(ddof=1, dtype=np.float64)) if len(values) > 1 else 0.0,
                "ci95": list(bootstrap_mean(values)),
            }
            for name, values in columns.items()
        },
        **costs_of(records),
    }
