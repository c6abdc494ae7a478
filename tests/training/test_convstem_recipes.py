"""The recipes of ConvStem models on a tiny model and the built-in images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vitadel

STEM = [[6, 2], [8, 2], [12, 2], [16, 2]]
SHAPE = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 3, "stem": STEM}
TINY: dict[str, Any] = {
    "model": {"weights": "random", "kwargs": SHAPE, "num_classes": 10, "input_size": 32},
    "data": {"train": "shapes@train", "test": "shapes@test", "limit": 32, "held_out": 8, "workers": 0},
    "train.epochs": 1,
    "train.batch_size": 16,
    "schedule.warmup_epochs": 0,
    "validation.limit": 8,
    "audit.limit": 8,
    "audit.attacks": ["pgd-2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "row", "changes", "threat"),
    [
        ("convstem/imagenet", "vit-s", {}, ("linf", "4/255")),
        ("convstem/finetune", "linf-8", {}, ("linf", "8/255")),
        ("convstem/finetune", "l1-75", {"threat.eps": 5}, ("l1", "5")),  # 75 is for 224 pixels
    ],
)
def test_a_tiny_run(recipe: str, row: str, changes: dict[str, Any], threat: tuple[str, str], tmp_path: Path) -> None:
    results = vitadel.harden(recipe, {**TINY, **changes}, row=row, out=tmp_path / "run")
    assert (results["threat"]["norm"], results["threat"]["eps_text"]) == threat
    assert results["clean"]["n"] == 8
    assert list((tmp_path / "run" / "weights").glob("*.safetensors"))
