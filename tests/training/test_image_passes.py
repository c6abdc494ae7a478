"""Images that pass through a model in training, counted at its first block."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from small_recipes import recipe
from vitadel.backbones.classifier import wrap
from vitadel.runtime.distributed import join_processes
from vitadel.training.metrics import count_image_passes
from vitadel.training.run import run_harden
from vits import make_vit


def test_every_image_counts_as_often_as_it_passes():
    model = wrap(make_vit("vit"))
    with count_image_passes(model) as passes:
        model(torch.rand(3, 3, 32, 32))
        model(torch.rand(2, 3, 32, 32)).sum().backward()
    model(torch.rand(1, 3, 32, 32))
    assert passes.count == 5


def test_a_model_without_blocks_is_not_counted():
    with count_image_passes(nn.Linear(2, 2)) as passes:
        assert passes is None


@pytest.mark.parametrize(
    ("objective", "times"),
    [
        ({"use": "standard"}, 1),
        ({"use": "adversarial", "attack": "pgd-2(step=5/255)"}, 3),  # two gradients of the attack, and the update
        ({"use": "afat", "selector": "random"}, 2),  # clean and corrupted
    ],
    ids=["standard", "pgd-2", "afat"],
)
def test_a_training_records_its_passes(tmp_path, objective, times):
    built = recipe(objective=objective, data={"test": None}, train={"epochs": 1})
    run_harden(built, "small", join_processes("cpu"), out=tmp_path / "run", show_progress=False)
    assert json.loads((tmp_path / "run" / "time.json").read_text())["image_passes"] == times * 48
