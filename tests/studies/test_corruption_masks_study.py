"""Masks that are known: a corruption model that always chooses the first patches, and counts by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from vitadel.attacks.patches.corruption_model import CorruptionModel, save_corruption_model
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.runtime.distributed import join_processes
from vitadel.studies.corruption_masks import CorruptionMasksRequest, concentration, overlap, study_corruption_masks
from vits import make_vit

CPU = join_processes("cpu")


def test_entropy_of_even_and_of_single_choices():
    even = concentration(np.full(16, 5))
    assert (even["bits"], even["most_bits"], even["positions"]) == pytest.approx((4, 4, 16))
    alone = concentration(np.array([0, 7, 0, 0]))
    assert (alone["bits"], alone["positions"]) == (0, 1)
    assert concentration(np.array([2, 1, 1, 0]))["bits"] == pytest.approx(1.5)


def test_overlap_is_that_of_all_pairs():
    masks = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]], bool)
    pairs = [(a & b).sum() / 2 for a, b in itertools.combinations(masks, 2)]
    assert overlap(masks.sum(0), 4) == pytest.approx(np.mean(pairs))
    assert overlap(np.array([1, 1, 0]), 1) is None


def studied(folder, selector, **changes):
    model = wrap(make_vit("vit", classes=10), mean=(0.5,) * 3, std=(0.5,) * 3)
    settings = {"limit": 6, "batch_size": 4, "fills": 3, "share": 0.25, "selector": selector, **changes}
    request = CorruptionMasksRequest(**settings)
    return study_corruption_masks(open_target(model, "shapes(size=32)"), request, CPU, out=folder).results["study"]


def test_one_mask_for_every_image(tmp_path):
    """Equal scores choose the first of 16 patches, so that the commonest positions are the chosen ones themselves."""
    first = CorruptionModel(4, 4, 8)
    torch.nn.init.zeros_(first.mix)
    save_corruption_model(first, tmp_path / "afat" / "weights" / "corruption-model.safetensors")
    reported = studied(tmp_path / "run", str(tmp_path / "afat"))
    assert (reported["n"], reported["grid"], reported["corrupted"], reported["trained_here"]) == (6, [4, 4], 4, False)
    learned = reported["masks"]["learned"]
    assert (learned["bits"], learned["overlap"]) == pytest.approx((math.log2(4), 1))
    assert reported["accuracy"]["usual"] == reported["accuracy"]["learned"]
    assert reported["harm"]["usual"] == reported["harm"]["learned"]
    assert reported["masks"]["random"]["bits"] > learned["bits"]
    assert reported["overlap_by_chance"] == 0.25
    with np.load(tmp_path / "run" / "study.npz", allow_pickle=False) as arrays:
        assert arrays["heat learned"].tolist() == [[1, 1, 1, 1], *[[0, 0, 0, 0]] * 3]
        assert arrays["heat random"].sum() == pytest.approx(4)
        changed = (arrays["x"] != arrays["z"]).any(1).reshape(-1, 4, 8, 4, 8).any((2, 4)).reshape(-1, 16)
        assert changed.tolist() == arrays["chosen"].tolist()
        assert changed[0].tolist() == [True] * 4 + [False] * 12


def test_one_is_trained_where_none_is_given(tmp_path):
    reported = studied(tmp_path / "run", None, training_steps=1, fills=1)
    assert reported["trained_here"]
    assert (tmp_path / "run" / "corruption-model.safetensors").exists()


def test_what_does_not_fit_is_reported_before_anything_is_written(tmp_path):
    save_corruption_model(CorruptionModel(2, 2, 8), tmp_path / "c.safetensors")
    with pytest.raises(UserError, match="2 x 2 patches of side 8"):
        studied(tmp_path / "run", str(tmp_path / "c.safetensors"))
    with pytest.raises(UserError, match="neither a file nor a run folder"):
        studied(tmp_path / "run", str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="share"):
        CorruptionMasksRequest(share=0)
    assert not (tmp_path / "run").exists()
