"""What an attack's own course says about its number: findings, each with evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitadel.attacks.autoattack.fast import STAGES
from vitadel.evaluation.chance import surprising
from vitadel.evaluation.engine.stages import NOTE, MemberResult
from vitadel.findings import OK, SUSPICIOUS, Finding

__all__ = ["findings_about"]

_FULL = "run the full ensemble: --attacks autoattack"
_SURPRISE = 0.002  # share of all samples that Square may break after the gradients, and more by luck
_CONVERGED = 0.003  # share of the survivors that the last restarts may still break
_MISLED = 0.12  # share of all samples that may withstand the cross-entropy and fall to other losses
_FEW = 20
_COMPLETENESS = "attack-completeness"


def findings_about(name: str, legs: Sequence[MemberResult], n: int) -> list[dict[str, Any]]:
    """About an ensemble whose gradient-free member found something, and about `autoattack-fast`."""
    if "fell_in" in _notes(legs):
        return _about_fast(name, _notes(legs), n)
    return _about_square(name, legs, n)


def _notes(legs: Sequence[MemberResult]) -> dict[str, np.ndarray]:
    gathered: dict[str, list[np.ndarray]] = {}
    for leg in legs:
        for piece in leg.pieces:
            for key in piece:
                if key.startswith(NOTE):
                    gathered.setdefault(key.removeprefix(NOTE), []).append(piece[key])
    return {key: np.concatenate(parts) for key, parts in gathered.items()}


def _about_square(name: str, legs: Sequence[MemberResult], n: int) -> list[dict[str, Any]]:
    gradients_first = any(leg.name.startswith("apgd") for leg in legs[:1])
    square = next((leg for leg in legs if leg.name == "square"), None)
    if square is None or not gradients_first:
        return []
    broken = sum(int((~piece["held"]).sum()) for piece in square.pieces)
    if not surprising(broken, n, _SURPRISE):
        return []
    return [
        Finding(
            "black-box",
            SUSPICIOUS,
            f"Square, which uses no gradients, broke {broken} samples that the gradient attacks before it had left",
            "gradients are probably masked; look for non-differentiable or saturated parts and attack around them",
            f"{name}: a black-box attack breaks images that gradient attacks do not",
        ).as_dict()
    ]


def _about_fast(name: str, notes: dict[str, np.ndarray], n: int) -> list[dict[str, Any]]:
    fell = notes["fell_in"]
    count = {stage: int((fell == number).sum()) for number, stage in enumerate(STAGES)}
    met, alive = (int(notes[key].sum()) if key in notes else 0 for key in ("sentinel", "kept_alive"))
    standing = int((fell < 0).sum())
    if standing == 0:
        return []  # nothing left that could be doubted
    restarted = count["restarts"] + count["kept alive"]
    flat = int((np.isinf(notes["missing"]) & (fell < 0)).sum()) if "missing" in notes else 0
    doubts = []
    if count["sentinel"]:
        doubts.append(f"FAB or Square broke {count['sentinel']} of the {met} samples they were shown")
    if count["kept alive"]:
        unseen = int(notes["far"].sum()) - alive
        doubts.append(
            f"{count['kept alive']} of {alive} far samples fell when given all restarts, so about "
            f"{round(count['kept alive'] * unseen / alive)} more may be missing"
        )
    if restarted > max(1, _CONVERGED * (standing + restarted)):
        doubts.append(f"the last restarts still broke {restarted} samples")
    if met == 0:
        doubts.append("no standing sample met the sentinels: too few images to check the number by itself")
    if flat:
        doubts.append(f"{flat} standing samples have no gradient at all")
    late = sum(count.values()) - count["clean"] - count["cross-entropy"]
    if late > _MISLED * n:
        doubts.append(f"{late} samples withstood the cross-entropy and fell to other losses: its gradients mislead")
    told = f"{standing} samples stand; sentinels met {met} of them, {alive} far ones were kept alive"
    if met < _FEW:
        told += ", which is few"
    title = f"{name}: the attack may miss adversarial examples"
    if not doubts:
        advice = f"an upper bound from autoattack-fast, not an AutoAttack number; for one, {_FULL}"
        return [Finding(_COMPLETENESS, OK, told, advice, title).as_dict()]
    return [Finding(_COMPLETENESS, SUSPICIOUS, f"{'; '.join(doubts)} ({told})", _FULL, title).as_dict()]
