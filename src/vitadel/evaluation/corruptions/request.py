"""The request of a corruption benchmark, and checks of names and severities."""

from __future__ import annotations

from dataclasses import dataclass

from vitadel.corruptions.constants import COMMON, EXTRA, SEVERITIES
from vitadel.corruptions.sequences import CIFAR_SEQUENCES, IMAGENET_SEQUENCES, VALIDATION_SEQUENCES
from vitadel.errors import UserError, check_known
from vitadel.evaluation.engine.run import RunRequest
from vitadel.evaluation.engine.stages import PRECISIONS


@dataclass(frozen=True)
class CorruptionRequest(RunRequest):
    """What a corruption benchmark is asked to do.

    `corruptions` None means the 15 that mCE is the mean over, or those of them that are available; () means none.
    `perturbations` likewise are sequences: None for the ten that mFR is the mean over, () for none. `clean_data` is the
    clean version of a benchmark that is read from files, for the clean accuracy and the relative mCE.
    """

    corruptions: tuple[str, ...] | None = None
    severities: tuple[int, ...] = SEVERITIES
    perturbations: tuple[str, ...] | None = ()
    difficulty: int = 1
    clean_data: str | None = None
    precision: str = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_corruptions(self.corruptions or ())
        check_severities(self.severities)
        sequences = tuple(dict.fromkeys((*IMAGENET_SEQUENCES, *CIFAR_SEQUENCES, *VALIDATION_SEQUENCES)))
        _check_names(self.perturbations or (), sequences, "perturbation")
        if self.corruptions == () and self.perturbations == ():
            raise UserError("no corruption and no perturbation is requested; give some with --corruptions")
        if self.difficulty not in (1, 2, 3):
            raise UserError(f"--difficulty must be 1, 2 or 3, got {self.difficulty}")
        check_known("precision", self.precision, PRECISIONS)


def check_corruptions(names: tuple[str, ...]) -> None:
    _check_names(names, (*COMMON, *EXTRA), "corruption")


def check_severities(severities: tuple[int, ...]) -> None:
    wrong = [level for level in severities if level not in SEVERITIES]
    if wrong or not severities or len(set(severities)) < len(severities):
        given = ", ".join(map(str, severities)) or "none"
        raise UserError(
            f"--severities takes some of 1, 2, 3, 4, 5, each once; got {given} (0 would be the clean image)"
        )


def _check_names(names: tuple[str, ...], known: tuple[str, ...], what: str) -> None:
    for name in names:
        check_known(what, name, known)
        if names.count(name) > 1:
            raise UserError(f"{what} {name!r} is listed twice")
