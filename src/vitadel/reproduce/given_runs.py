"""`--have ROW=RUN`: use what is already trained, if it was trained by the row's recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.reproduce.jobs import Job, TableJobs
from vitadel.training.recipes.compose import compose, deciding
from vitadel.training.recipes.yaml_files import parse_recipe, translate_settings

_NOT_COMPARED = ("data.test", "data.root", "train.seed", "data.workers", "train.tracker", "train.checkpoint_every")
_MOST_SHOWN = 8


def read_have(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """'trades=runs/a' or, for several seeds, 'trades=runs/a,runs/b'."""
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        row, equals, runs = text.partition("=")
        if not equals or not row or not runs:
            raise UserError(f"--have takes ROW=RUNFOLDER, as in --have trades=runs/mine; got {text!r}")
        found[row] = (*found.get(row, ()), *runs.split(","))
    return found


def check_given(table: TableJobs, folders: Path) -> None:
    """Refuse runs that are not finished, or were trained by another recipe than the row's."""
    for job in table.jobs:
        if job.have is not None and job.training is not None:
            _check(job, Path(job.have), folders)


def _check(job: Job, folder: Path, folders: Path) -> None:
    recipe = folder / "recipe.yaml"
    if not recipe.is_file() or not (folder / "weights").is_dir():
        raise UserError(
            f"--have {job.row.id}={folder}: this is no run folder of `vitadel harden`, which holds recipe.yaml and "
            "weights. Give the folder that the training printed as its last line."
        )
    training = job.training
    assert training is not None
    wanted = compose(training.recipe, training.row, {**training.overrides, "data.test": None})
    had = deciding(parse_recipe(recipe.read_text("utf-8"), str(recipe)))
    if "amp_dtype" not in wanted["train"]:  # then any precision will do, and a GPU has its own
        had.pop("train.amp_dtype", None)
    chosen = "" if training.choose is None else training.choose.key  # which the user chose in some way
    differences = [
        each
        for each in _differences(_comparable(deciding(wanted)), _comparable(translate_settings(had)))
        if not chosen or not each.startswith(f"{chosen}:")
    ]
    if differences:
        shown = differences[:_MOST_SHOWN]
        more = len(differences) - len(shown)
        raise UserError(
            f"--have {job.row.id}={folder}: it was trained by another recipe than {training.recipe}, row "
            f"{training.row}:\n  "
            + "\n  ".join(shown)
            + (f"\n  and {more} more" if more else "")
            + "\nLeave it out to train the row, or give a run of its own recipe."
        )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the audit at the end, and data specs without the folder they lie in."""
    kept = {
        key: value
        for key, value in settings.items()
        if key not in _NOT_COMPARED and not key.startswith("audit.") and value is not None
    }
    for key, value in kept.items():
        if key.startswith("data.") and isinstance(value, str):
            kept[key] = re.sub(r":.*/", ":", value)
        if key in ("model.weights", "adapter.start") and isinstance(value, str):
            kept[key] = Path(value).name if value.startswith(("runs/", "/")) else value
    return {key: value for key, value in kept.items() if key != "adapter.start"}


def _differences(wanted: Mapping[str, Any], had: Mapping[str, Any]) -> list[str]:
    keys = sorted(wanted.keys() | had.keys())
    return [
        f"{key}: the row has {wanted.get(key)!r}, the run {had.get(key)!r}"
        for key in keys
        if wanted.get(key) != had.get(key)
    ]
