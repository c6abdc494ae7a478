"""`vitadel attack`: craft adversarial images and save them."""

from __future__ import annotations

from typing import Annotated

from vitadel.cli import options
from vitadel.cli.execution import audit_request, present, run_attacks
from vitadel.cli.options import AttackFlags, ClassifierFlags, DataFlags, RunFlags, expand_groups, option


@expand_groups
def attack(
    model: options.Model = "zoo:shapes-robust",
    attacks: AttackFlags = AttackFlags("pgd-20"),
    png: Annotated[
        bool, option("also write 8-bit images and classify them again: rounding can undo an attack", "--png")
    ] = False,
    data: DataFlags = DataFlags("shapes"),
    how: ClassifierFlags = ClassifierFlags(),
    run: RunFlags = RunFlags(),
    calibration: options.Calibration = None,
    precision: options.Precision = "fp32",
) -> None:
    """Craft adversarial images for MODEL and save them.

    Images that fool the model are saved as safetensors, floats in [0, 1].
    """
    keep = "png" if png else "images"
    request = audit_request(attacks, data, calibration=calibration, precision=precision, keep=keep)
    present(run_attacks("attack", [request], model, how, data, run), run, report=False)
