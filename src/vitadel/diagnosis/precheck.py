"""A glance before an audit: the doctor's checks that need no attack, on a few images."""

from __future__ import annotations

from typing import Any

from vitadel.diagnosis.finding import OK, SUSPICIOUS
from vitadel.diagnosis.run import DiagnosisRequest, examinable, examination_of
from vitadel.diagnosis.runner import CHECKS, examine
from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.engine.target import Target
from vitadel.runtime.distributed import Processes

__all__ = ["glance"]

IMAGES = 16
_NAME = "the doctor's glance"
_SEEN_BY_THE_AUDIT = ("evaluation mode", "outputs are logits", "same answer twice")
_NEEDS_MORE_IMAGES = ("clean accuracy",)
_AN_ATTACK_OF_ITS_OWN = ("a huge eps breaks everything", "averaging does no better")


def glance(target: Target, request: AuditRequest, processes: Processes) -> list[dict[str, Any]]:
    """Findings as an audit's results hold them: what was raised, or one that nothing was; none for an odd budget."""
    if not examinable(request.norm, request.eps):
        return []
    plan = DiagnosisRequest(
        eps=request.eps,
        norm=request.norm,
        limit=IMAGES,
        batch_size=request.batch_size,
        seed=request.seed,
        skip_bad=bool(request.skip_bad),
    )
    left_out = {*_SEEN_BY_THE_AUDIT, *_NEEDS_MORE_IMAGES, *_AN_ATTACK_OF_ITS_OWN}
    checks = [check for check in CHECKS if check.name not in left_out and not check.attacks(plan.depth)]
    e, _, _ = examination_of(target, plan, processes)
    examined = examine(e, checks)
    found = examined.findings
    raised = [finding.as_dict() for finding in found if finding.verdict != OK]
    if examined.failed:
        told = "; ".join(f"'{check}' ended in {fault}" for check, fault in examined.failed.items())
        advice = "repair the model, or use a smaller --batch-size: what cannot be examined cannot be trusted"
        raised.append({"check": _NAME, "verdict": SUSPICIOUS, "evidence": told, "advice": advice})
    return raised or [
        {
            "check": _NAME,
            "verdict": OK,
            "evidence": f"{len(found)} checks of outputs, gradients and attention on {len(e.x)} images raised nothing",
            "advice": f"'vitadel diagnose {target.model_spec}' also tries attacks against each other",
        }
    ]
