"""Findings of an audit about the model's outputs and about how an attack went: evidence, and what to do about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.autoattack.fast_evidence import FastEvidence
from vitadel.backbones.classifier import (
    looks_like_log_probabilities,
    looks_like_probabilities,
    modules_in_train_mode,
)
from vitadel.data.batches import read_batches
from vitadel.evaluation.engine.stages import NOTE, MemberResult, RunContext
from vitadel.findings import (
    BROKEN,
    LOG_PROBABILITY_OUTPUTS,
    OK,
    PROBABILITY_OUTPUTS,
    RANDOM_OUTPUTS,
    SUSPICIOUS,
    TRAIN_MODE,
    Finding,
)
from vitadel.statistics import exceeds_share

_FULL = "run the full ensemble: --attacks autoattack"
_SURPRISE = 0.002  # share of all samples that Square may break after the gradients, and more by chance


def findings_about_mode(model: nn.Module) -> list[dict[str, Any]]:
    training = modules_in_train_mode(model)
    if not training:
        return []
    return [
        TRAIN_MODE.finding(
            SUSPICIOUS,
            f"{len(training)} modules were in train mode, the first: {training[0]}",
            "audited in eval mode; call model.eval() before deploying, or dropout and batch norm differ",
        ).as_dict()
    ]


def findings_about_outputs(context: RunContext, indices: Tensor) -> list[dict[str, Any]]:
    """Probabilities instead of logits saturate the cross-entropy; random outputs make single verdicts worthless."""
    first = [indices[: min(8, context.batch_size)].tolist()]
    how: dict[str, Any] = {"skip_bad": context.skip_bad, "device": context.processes.device}
    (batch,) = read_batches(context.source, first, context.preprocess, **how)
    with torch.no_grad():
        outputs, again = (context.model(batch.x) for _ in range(2))
    findings = []
    change = float((outputs - again).abs().max() / outputs.abs().max().clamp(min=1e-12))
    if change > 1e-4:
        findings.append(
            RANDOM_OUTPUTS.finding(
                SUSPICIOUS,
                f"the logits of the same {len(outputs)} images changed by {change:.1e} of their size",
                "the model's outputs are random: attack it with autoattack-rand or the prefix eot:20+, and do not "
                "trust a verdict from a single pass",
            ).as_dict()
        )
    if looks_like_probabilities(outputs):
        findings.append(
            PROBABILITY_OUTPUTS.finding(
                BROKEN,
                f"all outputs of {len(outputs)} images lie in [0, 1] and add up to 1",
                "return logits instead of probabilities: a softmax before the loss hides gradients from attacks",
            ).as_dict()
        )
    elif looks_like_log_probabilities(outputs):
        findings.append(
            LOG_PROBABILITY_OUTPUTS.finding(
                SUSPICIOUS,
                f"no output of {len(outputs)} images is above 0, and their exponentials add up to 1",
                "return logits, without log_softmax: attacks are not harmed, but confident outputs are rounded to 0",
            ).as_dict()
        )
    return findings


_DECISIVE = ("clean-accuracy", "known-accuracy", "constant-prediction", "better-set-up")


def without_reassurance(findings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The findings; if the clean accuracy makes no sense, without those that say that something else is fine."""
    doubted = any(each["check"] in _DECISIVE for each in findings)
    return [each for each in findings if not doubted or each["verdict"] != OK]


def findings_about(name: str, members: Sequence[MemberResult], n: int) -> list[dict[str, Any]]:
    """About an ensemble whose gradient-free member broke samples, and about `autoattack-fast`."""
    evidence = _fast_evidence(members)
    return _about_square(name, members, n) if evidence is None else _about_fast(name, evidence)


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


def _about_fast(name: str, evidence: FastEvidence) -> list[dict[str, Any]]:
    if evidence.searched == 0:
        return []  # nothing left that could be doubted
    check, title = "attack-completeness", f"{name}: the attack may miss adversarial examples"
    doubts = [*evidence.signs, *evidence.doubts]
    if not doubts:
        advice = f"an upper bound from autoattack-fast, not an AutoAttack number; for one, {_FULL}"
        return [Finding(check, OK, evidence.summary, advice, title).as_dict()]
    text, advice = f"{'; '.join(doubts)} ({evidence.summary})", _FULL
    if evidence.escalation:
        lost = evidence.searched - evidence.robust
        text = f"signs of masked gradients, so all of AutoAttack ran and broke {lost} more samples: {text}"
        advice = "the number is AutoAttack's or lower; find what masks the gradients with 'vitadel diagnose'"
    elif evidence.signs:
        text = f"signs of masked gradients, and AutoAttack did not run (--no-escalate): {text}"
    return [Finding(check, SUSPICIOUS, text, advice, title).as_dict()]


def escalation_of(members: Sequence[MemberResult]) -> dict[str, Any]:
    """The fields of results about the escalation of `autoattack-fast`; empty for other attacks."""
    evidence = _fast_evidence(members)
    if evidence is None:
        return {}
    extra = [member for member in members if member.name in evidence.escalation]
    return {
        "escalated": bool(extra),
        "escalation": {
            "reasons": evidence.signs if evidence.searched else [],
            "doubts": evidence.doubts if evidence.searched else [],
            "sentinels": evidence.sentinels,
            "broken_by_sentinels": evidence.broken_by_sentinels,
            "closer_than_gradients": evidence.ahead,
            "kept_promises": {start: kept.median(0).values.tolist() for start, kept in evidence.kept_from.items()},
            "one_hot_rows": None if math.isnan(evidence.one_hot) else evidence.one_hot,
            "broken": sum(member.broken for member in extra),
            "gradient_calls": sum(int(record["gradients"]) for member in extra for record in member.records),
            "forward_calls": sum(int(record["forwards"]) for member in extra for record in member.records),
        },
    }


def given_up_of(members: Sequence[MemberResult], n: int) -> dict[str, Any]:
    """The field of results about samples that `autoattack-fast` gave up, if AutoAttack did not attack them after all.

    `n` samples are all of the audit.
    """
    evidence = _fast_evidence(members)
    if evidence is None or evidence.escalation or not evidence.given_up:
        return {}
    most, found = evidence.missed_at_most, evidence.broken_by_audit
    sentence = (
        f"{evidence.given_up} images were given up as far from every boundary. {evidence.audited} of them, drawn at "
        f"random, were attacked to the end, and {found} were broken"
    )
    if evidence.searched_whole:
        sentence += ". Too many would be missed, so all were attacked to the end after all."
    elif evidence.audited == evidence.given_up:
        sentence += ": all of them, as fewer would bound too little."
    else:
        sentence += f": at most {100 * most / n:.1f} points are missed by giving up (one-sided 95 % bound)."
    return {
        "given_up": {
            "images": evidence.given_up,
            "audited": evidence.audited,
            "broken": found,
            "missed_at_most": most,
            "missed_share_at_most": most / n,
            "sentence": sentence,
        }
    }


def _fast_evidence(members: Sequence[MemberResult]) -> FastEvidence | None:
    if not members or f"{NOTE}fell_in" not in next(iter(members[0].records), {}):
        return None
    return FastEvidence({member.name: member.as_stage() for member in members})
