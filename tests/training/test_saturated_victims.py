"""`aas/shapes-saturated` and `aas/shapes-training` in their smallest form: the rows, and that controls are such."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitadel
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.training.recipes.compose import compose, rows

VICTIMS, NAME = "aas/shapes-saturated", "aas/shapes-training"
SHORT = {
    "train.epochs": 3,
    "train.batch_size": 32,
    "data.limit": 64,
    "data.held_out": 20,
    "plugins.epsilon_warmup": None,
    "schedule.warmup_epochs": 0,
    "audit.attacks": "fgsm",
    "audit.limit": 10,
    "validation.every": 3,
    "validation.limit": 10,
    "objective.attack": "pgd-1",
}
SCALING = {"plugins.attention_scaling.gap": 2, "plugins.attention_scaling.images": 32}


def trained(row: str, folder: Path) -> Classifier:
    more = SCALING if "+" in row else {}
    out = folder / row
    vitadel.harden(NAME, {**SHORT, **more}, row=row, out=out)
    return load_model(str(out))


def test_rows_are_victims_and_victims_times_training() -> None:
    assert rows(VICTIMS) == [f"scale-{scale}" for scale in (1, 10, 30, 100)]
    assert compose(VICTIMS, "scale-100")["model"]["kwargs"]["attention_scale"] == 100
    assert rows(NAME) == [f"scale-{scale}{how}" for scale in (1, 1000) for how in ("", "+aas", "+random", "+fixed")]
    assert "attention_scale" not in compose(NAME, "scale-1+aas")["model"]["kwargs"]
    searches = [compose(NAME, f"scale-1000{how}").get("plugins") for how in ("+aas", "+random", "+fixed")]
    assert [each["attention_scaling"].pop("search") for each in searches] == ["both", "random", "fixed"]
    assert searches[0] == searches[1] == searches[2]


@pytest.mark.slow
def test_the_victim_keeps_its_scale_and_its_factors(tmp_path: Path) -> None:
    plain, random = trained("scale-1000", tmp_path), trained("scale-1000+random", tmp_path)
    assert plain.record.kwargs["attention_scale"] == random.record.kwargs["attention_scale"] == 1000
    assert plain.record.attention_factors is None
    assert random.record.attention_factors is not None
    assert len({*random.record.attention_factors}) == 2
    assert all(0.01 <= factor < 1 for factor in random.record.attention_factors)


@pytest.mark.slow
def test_factors_fixed_at_one_are_the_training_without(tmp_path: Path) -> None:
    plain, fixed = trained("scale-1000", tmp_path), trained("scale-1000+fixed", tmp_path)
    assert fixed.record.attention_factors == (1, 1)
    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), fixed(x))
