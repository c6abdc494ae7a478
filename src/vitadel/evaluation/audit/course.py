"""What `--curve` and `--second-phase` do in place of one attack after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from vitadel.evaluation.audit.curve import Curve
from vitadel.evaluation.audit.second_phase import SecondPhase
from vitadel.types import Attack

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest, AuditWork
    from vitadel.evaluation.engine.run import Run
    from vitadel.evaluation.engine.stages import MemberResult, RunContext
    from vitadel.evaluation.engine.verdicts import Verdicts


class Course(Protocol):
    """Another course of the attacks than one after another on what the earlier ones left."""

    def attack(
        self, work: AuditWork, context: RunContext, verdicts: Verdicts, indices: Tensor, findings: list[dict[str, Any]]
    ) -> tuple[list[tuple[str, Attack]], list[MemberResult]]:
        """Run the attacks; returns what `AuditWork.attack` does."""
        ...

    def finish(self, run: Run, results: dict[str, Any], verdicts: Verdicts) -> dict[str, Any]:
        """The results with what the course adds."""
        ...


def course_of(request: AuditRequest) -> Course:
    """The course that a request asks for; refuses what does not go together."""
    return Curve(request) if request.curve else SecondPhase(request)
