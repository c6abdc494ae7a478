"""`vitadel list models --published`: all models, and a card for a single one."""

from __future__ import annotations

from command_line import vitadel
from vitadel.backbones.published import catalogue


def test_published_models_are_listed_with_their_numbers() -> None:
    shown = vitadel("list", "models", "--published").stdout
    assert all(each.spec in shown for each in catalogue())
    assert "autoattack 54.66" in " ".join(shown.split())


def test_a_single_model_has_a_card() -> None:
    shown = " ".join(vitadel("list", "models", "Singh2023Revisiting_ViT-B", "--published").stdout.split())
    assert "no normalization (raw pixels); crop 0.875, bicubic" in shown
    assert "weights Google Drive, linked from RobustBench" in shown


def test_only_models_are_published() -> None:
    assert "--published lists models, not attacks" in vitadel("list", "attacks", "--published", code=2).stderr
