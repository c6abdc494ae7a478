"""`vitadel corruptions`: error rates on corrupted images, and prediction flips along sequences."""

from __future__ import annotations

from typing import Annotated

from vitadel.cli import options
from vitadel.cli.execution import open_target, present, run_options
from vitadel.cli.options import ClassifierFlags, DataFlags, RunFlags, expand_groups, option, split_list
from vitadel.errors import UserError

Severities = Annotated[str, option("some of 1,2,3,4,5")]


@expand_groups
def corruptions(
    model: options.Model = "zoo:shapes-robust",
    corruptions: Annotated[
        str, option("common (the 15 of mCE), all (with the 4 for validation), none, or names: fog,snow")
    ] = "common",
    severities: Severities = "1,2,3,4,5",
    perturbations: Annotated[str, option("sequences of ImageNet-P: all (the 10 of mFR), none, or names")] = "none",
    difficulty: Annotated[int, option("1, 2 or 3: how much sequences change from frame to frame")] = 1,
    data: DataFlags = DataFlags("shapes"),
    clean_data: Annotated[str | None, option("clean images for --data imagenet-c:DIR or cifar10-c, as SPEC")] = None,
    how: ClassifierFlags = ClassifierFlags(),
    run: RunFlags = RunFlags(),
    precision: options.Precision = "fp32",
) -> None:
    """Measure accuracy of MODEL on corrupted images.

    Corruptions of ImageNet-C and sequences of ImageNet-P, for any data.
    """
    from vitadel.evaluation.corruptions.request import CorruptionRequest
    from vitadel.evaluation.corruptions.run import run_corruptions

    request = CorruptionRequest(
        corruptions=corruption_list(corruptions),
        severities=severity_list(severities),
        perturbations={"none": (), "all": None}.get(perturbations, _names(perturbations)),
        difficulty=difficulty,
        clean_data=clean_data,
        precision=precision,
        **data.for_request(),
    )
    processes, target = open_target(model, how, data, run.device)
    present(run_corruptions(target, request, processes, **run_options(run)), run)


def corruption_list(text: str) -> tuple[str, ...] | None:
    """Return the names of the corruptions; None for the 15 common ones."""
    from vitadel.corruptions.constants import COMMON, EXTRA

    return {"common": None, "all": (*COMMON, *EXTRA), "none": ()}.get(text.strip(), _names(text))


def severity_list(text: str) -> tuple[int, ...]:
    """Return the severities as whole numbers; the request checks their range."""
    parts = split_list(text)
    if not all(part.isdigit() for part in parts):
        raise UserError(f"--severities takes some of 1, 2, 3, 4, 5, separated by commas; got {text!r}")
    return tuple(int(part) for part in parts)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name in split_list(text))
