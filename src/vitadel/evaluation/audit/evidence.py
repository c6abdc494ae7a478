"""Findings of an audit about the model's outputs and about how an attack went: evidence, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitadel.attacks.autoattack.fast import STAGES
from vitadel.backbones.classifier import looks_like_probabilities, modules_in_train_mode
from vitadel.data.batches import read_batches
from vitadel.evaluation.engine.stages import NOTE, MemberResult, RunContext
from vitadel.findings import BROKEN, OK, PROBABILITY_OUTPUTS, RANDOM_OUTPUTS, SUSPICIOUS, TRAIN_MODE, Finding
from vitadel.statistics import exceeds_share

_FULL = "run the full ensemble: --attacks autoattack"
_SURPRISE = 0.002  # share of all samples that Square may break after the gradients, and more by chance
_CONVERGED = 0.003  # share of the survivors that the last restarts may still break
_MISLED = 0.12  # share of all samples that may withstand the cross-entropy and not other losses
_FEW = 20


def findings_about_mode(model: nn.Module) -> list[dict[str, Any]]:
    training = modules_in_train_mode(model)
    if not training:
        return []
    return [
        Finding(
            TRAIN_MODE.identifier,
            SUSPICIOUS,
            f"{len(training)} modules were in train mode, the first: {training[0]}",
            "audited in eval mode; call model.eval() before deploying, or dropout and batch norm differ",
            TRAIN_MODE.title,
        ).as_dict()
    ]


def findings_about_outputs(context: RunContext, indices: Tensor) -> list[dict[str, Any]]:
    """Probabilities instead of logits saturate the cross-entropy; random outputs make single verdicts worthless."""
    first = [indices[: min(8, context.batch_size)].tolist()]
    (batch,) = read_batches(context.source, first, context.preprocess, skip_bad=context.skip_bad)
    with torch.no_grad():
        outputs, again = (context.model(batch.to(context.processes.device).x) for _ in range(2))
    findings = []
    change = float((outputs - again).abs().max() / outputs.abs().max().clamp(min=1e-12))
    if change > 1e-4:
        findings.append(
            Finding(
                RANDOM_OUTPUTS.identifier,
                SUSPICIOUS,
                f"the logits of the same {len(outputs)} images changed by {change:.1e} of their size",
                "the model's outputs are random: attack it with autoattack-rand or the prefix eot:20+, and do not "
                "trust a verdict from a single pass",
                RANDOM_OUTPUTS.title,
            ).as_dict()
        )
    if looks_like_probabilities(outputs):
        findings.append(
            Finding(
                PROBABILITY_OUTPUTS.identifier,
                BROKEN,
                f"all outputs of {len(outputs)} images lie in [0, 1] and add up to 1",
                "return logits instead of probabilities: a softmax before the loss hides gradients from attacks",
                PROBABILITY_OUTPUTS.title,
            ).as_dict()
        )
    return findings


def findings_about(name: str, members: Sequence[MemberResult], n: int) -> list[dict[str, Any]]:
    """About an ensemble whose gradient-free member broke samples, and about `autoattack-fast`."""
    notes = _notes(members)
    return _about_fast(name, notes, n) if "fell_in" in notes else _about_square(name, members, n)


def _notes(members: Sequence[MemberResult]) -> dict[str, np.ndarray]:
    collected: dict[str, list[np.ndarray]] = {}
    for record in (record for member in members for record in member.records):
        for key in record:
            if key.startswith(NOTE):
                collected.setdefault(key.removeprefix(NOTE), []).append(record[key])
    return {key: np.concatenate(parts) for key, parts in collected.items()}


def _about_square(name: str, members: Sequence[MemberResult], n: int) -> list[dict[str, Any]]:
    gradients_first = any(member.name.startswith("apgd") for member in members[:1])
    square = next((member for member in members if member.name == "square"), None)
    if square is None or not gradients_first or not exceeds_share(square.broken, n, _SURPRISE):
        return []
    return [
        Finding(
            "black-box",
            SUSPICIOUS,
            f"Square, which uses no gradients, broke {square.broken} samples that the gradient attacks before it had "
            "not",
            "gradients are probably masked; look for non-differentiable or saturated parts and attack around them",
            f"{name}: a black-box attack breaks images that gradient attacks do not",
        ).as_dict()
    ]


def _about_fast(name: str, notes: dict[str, np.ndarray], n: int) -> list[dict[str, Any]]:
    fell = notes["fell_in"]
    count = {stage: int((fell == number).sum()) for number, stage in enumerate(STAGES)}
    met, alive = (int(notes[key].sum()) if key in notes else 0 for key in ("sentinel", "kept_alive"))
    robust = int((fell < 0).sum())
    if robust == 0:
        return []  # nothing left that could be doubted
    restarted = count["restarts"] + count["kept alive"]
    flat = int((np.isinf(notes["missing"]) & (fell < 0)).sum()) if "missing" in notes else 0
    doubts = []
    if count["sentinel"]:
        doubts.append(f"FAB or Square broke {count['sentinel']} of the {met} samples they were run on")
    if count["kept alive"]:
        unseen = int(notes["far"].sum()) - alive
        doubts.append(
            f"{count['kept alive']} of {alive} far samples were misclassified when given all restarts, so about "
            f"{round(count['kept alive'] * unseen / alive)} more may be missing"
        )
    if restarted > max(1, _CONVERGED * (robust + restarted)):
        doubts.append(f"the last restarts still broke {restarted} samples")
    if met == 0:
        doubts.append("no robust sample was checked by FAB and Square: too few images to check the number by itself")
    if flat:
        doubts.append(f"{flat} robust samples have no gradient at all")
    late = sum(count.values()) - count["clean"] - count["cross-entropy"]
    if late > _MISLED * n:
        doubts.append(
            f"{late} samples withstood the cross-entropy and were misclassified under other losses: its gradients "
            "mislead"
        )
    summary = f"{robust} samples are robust; FAB and Square checked {met} of them, {alive} far ones got all restarts"
    if met < _FEW:
        summary += ", which is few"
    check, title = "attack-completeness", f"{name}: the attack may miss adversarial examples"
    if not doubts:
        advice = f"an upper bound from autoattack-fast, not an AutoAttack number; for one, {_FULL}"
        return [Finding(check, OK, summary, advice, title).as_dict()]
    return [Finding(check, SUSPICIOUS, f"{'; '.join(doubts)} ({summary})", _FULL, title).as_dict()]
