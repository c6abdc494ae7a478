"""Checks before an audit: those of the diagnosis that need no attack, on a few images."""

from __future__ import annotations

from typing import Any

from vitadel.diagnosis.run import CHECKS, DiagnosisRequest, examination_of, run_checks
from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.engine.target import Target
from vitadel.findings import (
    OK,
    PRECHECK,
    PROBABILITY_OUTPUTS,
    RANDOM_OUTPUTS,
    SUSPICIOUS,
    TRAIN_MODE,
)
from vitadel.quantities import can_diagnose
from vitadel.runtime.distributed import Processes

IMAGES = 16
GRADIENTS = 41.0
"""What the checks cost per image, in gradients: as measured on a ViT of 32 px (33) and on DeiT-Ti (30), and 11 of the
search in `gain-ratio`."""
_MADE_BY_THE_AUDIT = {check.identifier for check in (TRAIN_MODE, PROBABILITY_OUTPUTS, RANDOM_OUTPUTS)}
_NEED_MORE_IMAGES = {"clean-accuracy"}
_RUN_AN_ATTACK = {"unbounded-attack", "eot"}


def run_precheck(
    target: Target, request: AuditRequest, processes: Processes, show_progress: bool = False
) -> list[dict[str, Any]]:
    """Findings for an audit's results: the raised ones, or one that nothing was raised; none for a budget that
    `diagnose` does not accept."""
    if not can_diagnose(request.norm, request.eps):
        return []
    plan = DiagnosisRequest(
        eps=request.eps,
        norm=request.norm,
        limit=IMAGES,
        batch_size=request.batch_size,
        seed=request.seed,
        skip_bad=bool(request.skip_bad),
    )
    left_out = _MADE_BY_THE_AUDIT | _NEED_MORE_IMAGES | _RUN_AN_ATTACK
    checks = [check for check in CHECKS if check.identifier not in left_out and not check.attacks(plan.depth)]
    e, _, _ = examination_of(target, plan, processes)
    diagnosis = run_checks(e, checks, show_progress)
    found = diagnosis.findings
    raised = [finding for finding in found if finding.verdict != OK]
    if diagnosis.failed:
        failures = "; ".join(f"'{check}' ended in {fault}" for check, fault in diagnosis.failed.items())
        advice = "repair the model, or use a smaller --batch-size: a model that cannot be examined cannot be trusted"
        raised.append(PRECHECK.finding(SUSPICIOUS, failures, advice))
    if not raised:
        evidence = f"{len(found)} checks of outputs, gradients and attention on {len(e.x)} images raised nothing"
        advice = "a full diagnosis ('vitadel diagnose') also compares attacks with each other"
        raised.append(PRECHECK.finding(OK, evidence, advice))
    return [finding.as_dict() for finding in raised]
