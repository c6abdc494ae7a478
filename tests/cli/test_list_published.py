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


def test_sizes_are_those_of_the_papers() -> None:
    """Touvron et al. 2021: DeiT-Ti has 5.7 M parameters; the thesis of the light recipe: 46 M and 8.54 for XCiT-M12."""
    shown = " ".join(vitadel("list", "models", "deit_tiny_patch16_224").stdout.split())
    assert "deit_tiny_patch16_224 timm; 5.72 M parameters, 1.25 GMACs at 224 x 224" in shown
    name = "published:imagenet/Debenedetti2022Light_XCiT-M12"
    assert "46,401,160 parameters, 8.5" in vitadel("list", "models", name, "--published").stdout


def test_only_models_are_published() -> None:
    assert "--published lists models, not attacks" in vitadel("list", "attacks", "--published", code=2).stderr
