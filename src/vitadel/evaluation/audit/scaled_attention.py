"""What an audit adds about an attack through scaled attention: its factors, the paper's way of counting, controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.attention_scaling.aas import Rescaled
from vitadel.attacks.settings import part_inside
from vitadel.evaluation.engine.stages import MemberResult, RunContext, attack_stage, clean_stage
from vitadel.evaluation.engine.verdicts import Verdicts, costs_of
from vitadel.statistics import mcnemar, share, wilson
from vitadel.types import Attack, Threat

REMARK = "the scaled model attacked and judged instead of the deployed one: not a robustness estimate"


def describe_scaling(
    context: RunContext, stage: str, attack: Attack, threat: Threat, indices: Tensor, members: list[MemberResult]
) -> dict[str, Any]:
    """The fields `calibration`, `paper_style` and `controls` of an attack's results; empty if it scales nothing.

    `indices` are all images of the run, `members` the results of the attack on those that were exposed to it.
    """
    found = part_inside(attack, Rescaled)
    if found is None:
        return {}
    rescaled, around = found
    fields: dict[str, Any] = {} if rescaled.calibration is None else {"calibration": rescaled.calibration}
    if rescaled.paper_style:
        scaled, plain = rescaled.scaled(context.model), around(rescaled.attack)
        fields["paper_style"] = count_scaled(context, stage, scaled, plain, threat, indices)
    if rescaled.controls:
        fields["controls"] = _run_controls(context, stage, rescaled, around, threat, members)
    return fields


def count_scaled(
    context: RunContext, stage: str, scaled: nn.Module, attack: Attack, threat: Threat, indices: Tensor
) -> dict[str, Any]:
    """Clean and robust accuracy of the scaled model: what an audit of that model by this attack would find."""
    own = replace(context, model=scaled, compiled=None, save_examples=None)
    clean = Verdicts.of_clean(clean_stage(own, indices, f"{stage} scaled model, clean"))
    members = attack_stage(own, f"{stage} scaled model", attack, threat, clean.index[clean.correct], True)
    correct, n = int(clean.correct.sum()), len(clean.index)
    return {
        "clean_scaled": correct / n,
        "clean_scaled_correct": correct,
        "clean_scaled_ci95": list(wilson(correct, n)),
        **share(len(members[-1].held), n, "held", "accuracy"),
        **_costs(members),
        "remark": REMARK,
    }


def _run_controls(
    context: RunContext,
    stage: str,
    rescaled: Rescaled,
    around: Callable[[Attack], Attack],
    threat: Threat,
    members: list[MemberResult],
) -> list[dict[str, Any]]:
    """Attacks of the same cost, each alone on the images that the attack had; they do not count in the worst case.

    `only_attack` and `only_control` count the images that one of the two breaks and the other does not; `p` is
    McNemar's exact test of them.
    """
    from vitadel.attacks.attention_scaling.equal_cost import control_attacks

    own = replace(context, save_examples=None)
    exposed = members[0].as_stage().samples
    held, results = members[-1].held, []
    for number, (name, control) in enumerate(control_attacks(rescaled, context.model, context.seed)):
        found = attack_stage(own, f"{stage} control {number}", around(control), threat, exposed, True)
        left = found[-1].held
        only_attack, only_control = int((~torch.isin(left, held)).sum()), int((~torch.isin(held, left)).sum())
        results.append(
            {
                "name": name,
                **share(len(left), len(exposed), "held", "share_held"),
                "only_attack": only_attack,
                "only_control": only_control,
                "p": mcnemar(only_attack, only_control),
                **_costs(found),
            }
        )
    return results


def _costs(members: list[MemberResult]) -> dict[str, Any]:
    return costs_of([record for member in members for record in member.records])
