"""`vitadel stability`: attention, features and predictions when patches are noisy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from vitadel.cli import options
from vitadel.cli.execution import open_target, present, run_options
from vitadel.cli.options import ClassifierFlags, DataFlags, RunFlags, expand_groups, option
from vitadel.quantities import read_quantity

Share = Annotated[str, option("share of patches that get noise")]
Noise = Annotated[str, option("'normalised': drawn in normalized space; 'pixel': all colors")]
PatchSide = Annotated[int, option("patch size in pixels; 0 for the model's own patches")]


@expand_groups
def stability(
    model: options.Model = "zoo:shapes-robust",
    share: Share = "0.1",
    masks: Annotated[int, option("random masks per image")] = 100,
    watched: Annotated[int, option("masks per image on which attention and features are compared")] = 10,
    similarity: Annotated[str, option("similarity of attention: map (whole map), rows or centre (one row)")] = "map",
    noise: Noise = "normalised",
    patch_side: PatchSide = 0,
    selector: Annotated[Path | None, option("corruption-model.safetensors of another run, tried on this model")] = None,
    learned: Annotated[bool, option("train a corruption model against this model")] = True,
    patch_attacks: Annotated[
        str, option("attacks run as well, at 1/255; '' for none")
    ] = "pgd-5(step=0.5/255),patch-fool",
    data: DataFlags = DataFlags("shapes"),
    how: ClassifierFlags = ClassifierFlags(),
    run: RunFlags = RunFlags(),
    calibration: options.Calibration = None,
) -> None:
    """Measure what noisy patches change in MODEL.

    Compares attention, features and predictions with those of the clean images.
    """
    from vitadel.attacks.parse import split_attack_list
    from vitadel.evaluation.stability.run import StabilityRequest, run_stability

    request = StabilityRequest(
        share=read_quantity(share, "--share"),
        masks=masks,
        watched=min(watched, masks),
        similarity=similarity,
        noise=noise,
        side=patch_side,
        learned=learned,
        selector=None if selector is None else str(selector),
        attacks=tuple(split_attack_list(patch_attacks)) if patch_attacks else (),
        calibration=calibration,
        **data.for_request(),
    )
    processes, target = open_target(model, how, data, run.device)
    present(run_stability(target, request, processes, **run_options(run)), run)
