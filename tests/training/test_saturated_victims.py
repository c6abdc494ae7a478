"""`aas/shapes-saturated` in its smallest form: what its rows train, and that the controls are controls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitadel
from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.training.recipes.compose import compose, rows

NAME = "aas/shapes-saturated"
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


def test_rows_are_victims_times_training() -> None:
    assert rows(NAME) == [f"scale-{s}{how}" for s in (1, 10, 30, 100) for how in ("", "+aas", "+random", "+fixed")]
    assert compose(NAME, "scale-100")["model"]["kwargs"]["attention_scale"] == 100
    assert "attention_scale" not in compose(NAME, "scale-1+aas")["model"]["kwargs"]


@pytest.mark.slow
def test_the_victim_keeps_its_scale_and_its_factors(tmp_path: Path) -> None:
    plain, random = trained("scale-100", tmp_path), trained("scale-100+random", tmp_path)
    assert plain.record.kwargs["attention_scale"] == random.record.kwargs["attention_scale"] == 100
    assert plain.record.attention_factors is None
    assert random.record.attention_factors is not None
    assert len({*random.record.attention_factors}) == 4
    assert all(0.01 <= factor < 1 for factor in random.record.attention_factors)


@pytest.mark.slow
def test_factors_fixed_at_one_are_the_training_without(tmp_path: Path) -> None:
    plain, fixed = trained("scale-10", tmp_path), trained("scale-10+fixed", tmp_path)
    assert fixed.record.attention_factors == (1, 1, 1, 1)
    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(x), fixed(x))
