"""Cosines of attention where they are known: nothing changes, or a model does not look."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from two_patterns import Faint, patterned

from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.studies.attention import AttentionRequest, cosines, mean_of_pairs, study_attention, unit_sum
from vits import make_vit

CPU = join_processes("cpu")


def lively():
    return wrap(make_vit("vit", classes=10), mean=(0.5,) * 3, std=(0.5,) * 3)


def studied(model, folder, **changes):
    request = AttentionRequest(**{"attack": "fgsm", "limit": 6, "batch_size": 4, **changes})
    return study_attention(open_target(model, "shapes(size=32)"), request, CPU, out=folder).results["study"]


def test_the_mean_over_pairs_is_that_of_all_pairs():
    rows = torch.rand(5, 2, 7, generator=torch.Generator().manual_seed(0))
    every = [float(cosines(rows[i], rows[j]).mean()) for i, j in itertools.combinations(range(5), 2)]
    parts = [unit_sum(rows[:3]).numpy(), unit_sum(rows[3:]).numpy()]
    assert mean_of_pairs(np.sum(parts, axis=0), 5) == pytest.approx(np.mean(every))
    assert mean_of_pairs(parts[0], 1) is None


def test_without_a_budget_nothing_moves(tmp_path):
    reported = studied(lively(), tmp_path / "run", eps=0.0)
    assert reported["cosine"]["attacked"]["mean"] == pytest.approx(1, abs=1e-6)
    assert reported["cosine"]["random"]["quantiles"]["0.05"] == pytest.approx(1, abs=1e-6)
    assert reported["fooled"]["fooled"] == 0
    assert reported["other_images"] < 0.999
    assert (reported["n"], reported["grid"], reported["heads"]) == (6, [4, 4], 3)


def test_a_model_that_does_not_look_has_one_map_for_all(tmp_path):
    model = lively()
    nn.init.zeros_(model.backbone.patch_embed.proj.weight)
    reported = studied(model, tmp_path / "run", query="class", eps=0.5)
    assert reported["cosine"]["attacked"]["mean"] == pytest.approx(1, abs=1e-6)
    assert reported["other_images"] == pytest.approx(1, abs=1e-6)


def test_each_head_by_itself_and_a_large_change(tmp_path):
    reported = studied(lively(), tmp_path / "run", heads="each", eps=0.5, query="1,2", block="0")
    assert len(reported["each_head"]) == 3
    mean = np.mean([each["mean"] for each in reported["each_head"]])
    assert reported["cosine"]["attacked"]["mean"] == pytest.approx(mean)
    assert reported["cosine"]["attacked"]["mean"] < 0.99
    groups = [each["n"] for each in reported["by_outcome"].values() if each]
    assert sum(groups) == reported["fooled"]["n"]
    with np.load(tmp_path / "run" / "study.npz", allow_pickle=False) as arrays:
        assert arrays["maps clean"].shape == (6, 3, 4, 4)
        np.testing.assert_allclose(arrays["maps clean"].sum((2, 3)), 1, atol=1e-5)
        assert np.abs(arrays["maps clean"] - arrays["maps attacked"]).max() > 0.01


def test_who_has_no_maps_is_reported_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="no anatomy known"):
        study_attention(open_target(patterned(), Faint()), AttentionRequest(), CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="ROW,COL"):
        AttentionRequest(query="left")
