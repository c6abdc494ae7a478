"""RobustBench's `model_info`: the fields of the JSON file that it keeps for each model of its leaderboards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically

__all__ = ["IMAGES", "THREATS", "model_info", "model_info_path", "update_model_info"]

IMAGES = {"cifar10": 10_000, "cifar100": 10_000, "imagenet": 5_000}
"""The data sets of RobustBench, and how many images its leaderboards count."""

THREATS = {"linf": "Linf", "l2": "L2", "corruptions": "corruptions"}
"""Its names for threat models."""

_FIELDS = (
    *("link", "name", "authors", "additional_data", "number_forward_passes", "dataset", "venue", "architecture"),
    *("eps", "clean_acc", "reported", "autoattack_acc", "corruptions_acc", "unreliable", "footnote"),
)


def model_info(dataset: str, threat: str, clean: float, robust: float, eps: str | None, **more: Any) -> dict[str, Any]:
    """The fields of a model; accuracies are shares, `threat` is RobustBench's name. What is not known is None."""
    accuracy = "corruptions_acc" if threat == "corruptions" else "autoattack_acc"
    numbers = {"dataset": dataset, "eps": eps, "clean_acc": f"{100 * clean:.2f}", accuracy: f"{100 * robust:.2f}"}
    known = {**numbers, **more}
    unknown = sorted(known.keys() - set(_FIELDS))
    assert not unknown, unknown
    other = "autoattack_acc" if threat == "corruptions" else "corruptions_acc"
    return {field: known.get(field) for field in _FIELDS if field != other}


def model_info_path(dataset: str, threat: str, name: str) -> Path:
    """Where RobustBench keeps the file, relative to its repository."""
    return Path("model_info") / dataset / threat / f"{name}.json"


def update_model_info(path: Path, info: Mapping[str, Any]) -> None:
    """Write the file; an existing one keeps the fields that are not known here."""
    before: dict[str, Any] = {}
    if path.exists():
        try:
            before = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"'{path}' is not a JSON object: {error}. Move it away, or correct it.") from error
    known = {field: value for field, value in info.items() if value is not None}
    write_atomically(path, (json.dumps({**info, **before, **known}, indent=2) + "\n").encode())
