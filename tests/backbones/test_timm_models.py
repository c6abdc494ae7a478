"""Names of models: timm's, and those of `families/`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vitadel.backbones import families, timm_models

FAMILY = """
from timm.models.vision_transformer import VisionTransformer
from vitadel.backbones.timm_models import data_config, register_models

class SlowViT(VisionTransformer):
    'A ViT of a new family.'

register_models(SlowViT, {"slow_vit_tiny": {"depth": 1}}, {"slow_vit_tiny": data_config(224, 0.9)})
"""


def test_a_file_in_families_adds_models_also_if_its_name_has_underscores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_vit.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    timm_models._families.cache_clear()
    try:
        assert timm_models.is_timm_name("slow_vit_tiny")
        assert not timm_models.is_timm_name("slow_vitamin")
    finally:
        timm_models._families.cache_clear()
        timm_models._OWN.pop("slow_vit_tiny", None)
        sys.modules.pop("vitadel.backbones.families.slow_vit", None)
