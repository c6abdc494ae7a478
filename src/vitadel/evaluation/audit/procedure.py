"""What `--curve` and `--second-phase` do in place of one attack after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from vitadel.evaluation.audit.curve import Curve
from vitadel.evaluation.audit.second_phase import SecondPhase
from vitadel.evaluation.audit.sequential_audit import check_sequential
from vitadel.types import Attack

if TYPE_CHECKING:
    from vitadel.evaluation.audit.audit import AuditRequest, AuditWork
    from vitadel.evaluation.engine.run import Run
    from vitadel.evaluation.engine.stages import MemberResult, RunContext
    from vitadel.evaluation.engine.verdicts import Verdicts


class Procedure(Protocol):
    """How the attacks of an audit run, where not one after another on what the earlier ones left."""

    def attack(
        self, work: AuditWork, context: RunContext, verdicts: Verdicts, indices: Tensor, findings: list[dict[str, Any]]
    ) -> tuple[list[tuple[str, Attack]], list[MemberResult]]:
        """Run the attacks; returns what `AuditWork.attack` does."""
        ...

    def finish(self, run: Run, results: dict[str, Any], verdicts: Verdicts) -> dict[str, Any]:
        """The results with what the procedure adds."""
        ...


def procedure_of(request: AuditRequest) -> Procedure | None:
    """The procedure that a request asks for, if any; refuses what does not go together."""
    procedure: Procedure | None = None
    if request.curve:
        procedure = Curve(request)
    elif request.second_phase is not None:
        procedure = SecondPhase(request)
    if request.is_sequential:
        check_sequential(request)
    return procedure
