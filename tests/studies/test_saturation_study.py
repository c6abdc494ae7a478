"""Saturation: thresholds as the float formats give them, histograms and quantiles whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vitadel.reporting.terminal import show_run
from vitadel.studies import study
from vitadel.studies.saturation import EDGES, SaturationRequest, count_gaps, quantile, thresholds


@pytest.mark.parametrize(
    ("kind", "rounds", "normal", "zero"),
    [
        (torch.float64, 36.7, 708.4, 744.4),
        (torch.float32, 16.6, 87.3, 103.3),
        (torch.float16, 7.6, 9.7, 16.6),
        (torch.bfloat16, 5.5, 87.3, 92.2),
    ],
)
def test_thresholds_are_those_of_the_formats(kind: torch.dtype, rounds: float, normal: float, zero: float) -> None:
    found = thresholds(kind)
    assert list(found.values()) == pytest.approx([rounds, normal, zero], abs=0.06)


def test_float32_itself_agrees() -> None:
    limits = thresholds(torch.float32)

    def best(gap: float) -> float:
        return float(torch.tensor([0.0, -gap]).softmax(0)[0])

    assert best(limits["rounds_to_one"] * 0.95) < 1
    assert best(limits["rounds_to_one"] * 1.05) == 1
    tiny = torch.finfo(torch.float32).tiny
    assert math.exp(-limits["leaves_normal_range"] * 0.999) > tiny > math.exp(-limits["leaves_normal_range"] * 1.001)
    assert float(torch.tensor(-limits["vanishes"] * 1.01).double().exp().float()) == 0
    assert float(torch.tensor(-limits["vanishes"] * 0.999).double().exp().float()) > 0


def test_every_gap_is_counted_once_and_where_it_belongs() -> None:
    gaps = torch.tensor([0.0, 1e-9, 1.0, 1.0, 5.0, 1e9])
    counts = count_gaps(gaps)
    assert counts.sum() == len(gaps)
    assert counts[0] == 2  # below the first edge
    assert counts[-1] == 1  # above the last
    place = int(np.flatnonzero(counts == 2)[1])
    assert EDGES[place - 1] <= 1.0 * (1 + 1e-12) < EDGES[place] * (1 + 1e-9)


def test_quantiles_of_a_histogram_are_those_of_the_values_to_half_a_bin() -> None:
    values = torch.logspace(-2, 3, 5001, dtype=torch.float64)
    counts = count_gaps(values)
    for share in (0.05, 0.25, 0.5, 0.75, 0.99):
        exact = 10 ** (-2 + 5 * share)
        assert quantile(counts, share) == pytest.approx(exact, rel=10 ** (1 / 64) - 1)
    assert quantile(count_gaps(torch.full((9,), 1e9)), 0.5) == EDGES[-1]
    assert quantile(count_gaps(torch.zeros(9)), 0.5) <= EDGES[0]


def test_user_errors() -> None:
    with pytest.raises(UserError, match="plain attack"):
        SaturationRequest(attack="aas+pgd-3")
    with pytest.raises(UserError, match="--images"):
        SaturationRequest(images=0)


def test_gaps_of_clean_images_alone_grow_with_the_models_attention_scale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block sees the same queries and keys, so its gaps grow by the factor; nothing is attacked."""
    found = {}
    for scale in (1, 64):
        torch.manual_seed(0)
        kwargs = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
        model = load_model(
            "vit_tiny_patch16_224", weights="random", num_classes=10, kwargs={**kwargs, "attention_scale": scale}
        )
        results = study("saturation", model, clean_only=True, limit=10, out=tmp_path / str(scale))["study"]
        assert [(each["attention"], each["images"]) for each in results["conditions"]] == [("deployed", "clean")]
        assert results["attack"] is None
        found[scale] = results["conditions"][0]["blocks"]
    assert found[64][0]["largest"] == pytest.approx(64 * found[1][0]["largest"], rel=1e-4)
    assert found[64][0]["quantiles"]["0.5"] == pytest.approx(64 * found[1][0]["quantiles"]["0.5"], rel=0.08)
    show_run(tmp_path / "64")
    assert "blocks.1.attn" in capsys.readouterr().out
