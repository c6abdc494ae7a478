"""Stability under noisy patches, where the answer is known: models that ignore patches, masks counted by hand."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from imagenet_a import RIGHT, answering, write_imagenet_a
from vitadel.attacks.patches.corruption_model import CorruptionModel, save_corruption_model
from vitadel.backbones.classifier import wrap
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import Interrupted, UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.evaluation.stability import run as stability
from vitadel.evaluation.stability.measures import drift, map_similarity, mean_with_interval, over_masks, steps_below_one
from vitadel.evaluation.stability.run import StabilityRequest, run_stability
from vitadel.reporting.kind import kind_of
from vitadel.reporting.kinds.stability import draw_stability, stability_tables
from vitadel.reporting.page import render
from vitadel.reporting.read_runs import read_run
from vitadel.reporting.terminal import show_run
from vitadel.runtime.distributed import join_processes
from vits import make_vit

CPU = join_processes("cpu")
DATA = "shapes(size=32)"
QUICK = {
    "masks": 4,
    "watched": 2,
    "limit": 12,
    "batch_size": 5,
    "attacks": (),
    "learned": False,
    "share": 0.25,
    "training_steps": 1,
}


def lively(**settings):
    return wrap(make_vit("vit", classes=10, **settings), mean=(0.5,) * 3, std=(0.5,) * 3)


def blind():
    """It answers by its class token and positions alone."""
    model = lively()
    nn.init.zeros_(model.backbone.patch_embed.proj.weight)
    return model


def measured(model, folder, resume=False, **changes):
    return run_stability(
        open_target(model, DATA), StabilityRequest(**{**QUICK, **changes}), CPU, out=folder, resume=resume
    )


def columns(folder):
    return {name: np.asarray(value) for name, value in pq.read_table(folder / "stability.parquet").to_pydict().items()}


def test_a_model_that_ignores_patches_is_perfectly_stable(tmp_path):
    results = measured(blind(), tmp_path / "run", learned=True).results
    reported, clean = results["stability"], results["clean"]["accuracy"]
    assert results["complete"]
    assert (reported["n"], reported["patches"], reported["corrupted"], reported["side"]) == (12, 16, 4, 8)
    for who in ("random", "learned"):
        part = reported[who]
        assert part["similarity"]["mean"] == pytest.approx(1, abs=1e-6)
        assert part["similarity"]["first_mask"]["counts"][-1] == 12
        assert part["drift"]["median"] == pytest.approx([0, 0], abs=1e-6)
        assert part["accuracy"]["mean"] == part["accuracy"]["curve"][0] == part["accuracy"]["best"]["accuracy"] == clean
    assert (tmp_path / "run" / "corruption-model.safetensors").exists()


def test_numbers_by_another_computation(tmp_path, monkeypatch):
    """Everything of one image again, without instruments: maps from q and k, features from the blocks."""
    model = lively()
    seen = []
    real = stability._noise_in

    def watched(request, selector):
        corrupt = real(request, selector)

        def noted(*given):
            seen.append((given[1], corrupt(*given)))
            return seen[-1][1]

        return noted

    monkeypatch.setattr(stability, "_noise_in", watched)
    reported = measured(model, tmp_path / "run", batch_size=12, masks=3).results["stability"]
    assert len(seen) == 3
    model.eval()
    cosines, gaps, right = [], [], []
    for x, z in seen[:2]:
        clean, noisy = layers(model, x), layers(model, z)
        cosines.append(np.mean([cosine(a, b) for (a, _), (b, _) in zip(clean, noisy, strict=True)], axis=0))
        gaps.append([norm(b - a) / norm(a) for (_, a), (_, b) in zip(clean, noisy, strict=True)])
    table = columns(tmp_path / "run")
    np.testing.assert_allclose(table["random:cosine"], np.mean(cosines, axis=0), atol=1e-5)
    np.testing.assert_allclose(table["random:cosine_worst"], np.min(cosines, axis=0), atol=1e-5)
    np.testing.assert_allclose(table["random:drift_last"], np.mean(gaps, axis=0)[1], rtol=1e-4)
    assert table["random:cosine_worst"].min() < 0.99
    with torch.no_grad():
        right = [(model(z).argmax(1).numpy() == table["label"]) for _, z in seen]
    assert table["random:right"].tolist() == np.sum(right, axis=0).tolist()
    assert reported["random"]["accuracy"]["mean"] == pytest.approx(np.mean(right))


@torch.no_grad()
def layers(model, x):
    """(attention map, output) of every block."""
    vit = model.backbone
    tokens = vit.norm_pre(vit._pos_embed(vit.patch_embed((x - model.mean) / model.std)))
    found = []
    for block in vit.blocks:
        inside = block.norm1(tokens)
        q, k, _ = block.attn.qkv(inside).unflatten(2, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        tokens = block(tokens)
        found.append(((q @ k.mT / 8**0.5).softmax(-1), tokens))
    return found


def cosine(a, b):
    a, b = a.flatten(2).double(), b.flatten(2).double()
    return ((a * b).sum(2) / a.norm(dim=2) / b.norm(dim=2)).mean(1).numpy()


def norm(each):
    return each.flatten(1).norm(dim=1).numpy()


def test_batches_and_a_resumed_run_change_nothing(tmp_path, monkeypatch):
    whole = measured(lively(), tmp_path / "whole", batch_size=12)
    real, done = stability._measure, 0

    def fragile(*given):
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(stability, "_measure", fragile)
    with pytest.raises(Interrupted, match="cut"):
        measured(lively(), tmp_path / "cut")
    again = measured(lively(), tmp_path / "cut", resume=True)
    assert done == 4  # two of three batches were there already
    one, other = columns(tmp_path / "whole"), columns(tmp_path / "cut")
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-5, err_msg=name)
    assert whole.results["stability"]["random"]["accuracy"] == again.results["stability"]["random"]["accuracy"]


def test_a_given_selector_chooses(tmp_path, monkeypatch):
    """Scores that do not depend on the image: the first patch is always the lowest, then the second."""
    selector = CorruptionModel(4, 4, 8)
    nn.init.zeros_(selector.mix)
    save_corruption_model(selector, tmp_path / "c.safetensors")
    changed = []
    real = stability._measure

    def spy(model, batch, rng, corrupt, masks, request):
        z = corrupt(model, batch.x, rng.stream("mask", 0))
        changed.append(((z - batch.x).abs().amax(1) > 0).unflatten(1, (4, 8)).unflatten(3, (4, 8)).any(4).any(2))
        return real(model, batch, rng, corrupt, masks, request)

    monkeypatch.setattr(stability, "_measure", spy)
    reported = measured(lively(), tmp_path / "run", selector=str(tmp_path / "c.safetensors")).results["stability"]
    assert set(reported) >= {"random", "transfer"}
    assert "learned" not in reported
    transferred = torch.cat(changed[3:]).flatten(1)
    assert transferred.tolist() == [[True] * 4 + [False] * 12] * 12  # of equal scores the first
    assert torch.cat(changed[:3]).flatten(1).sum(1).tolist() == [4] * 12


@pytest.mark.parametrize(("grid", "reported"), [
    ((2, 2, 16), "2 x 2 patches of side 16, but here images have 4 x 4 of side 8"),
    ((8, 8, 8), "8 x 8 patches of side 8, but here images have 4 x 4 of side 8"),
])  # fmt: skip
def test_a_selector_for_another_grid_is_reported_first(tmp_path, grid, reported):
    save_corruption_model(CorruptionModel(*grid), tmp_path / "c.safetensors")
    with pytest.raises(UserError, match=reported):
        measured(lively(), tmp_path / "run", selector=str(tmp_path / "c.safetensors"))
    assert not (tmp_path / "run").exists()


def test_masks_are_judged_among_the_classes_that_count(tmp_path):
    """A model that ignores images is as right with noise as without: also where 200 of 1000 classes may be answered."""
    model = wrap(make_vit("vit", classes=1000), mean=(0.5,) * 3, std=(0.5,) * 3)
    nn.init.zeros_(model.backbone.patch_embed.proj.weight)
    answering(model.backbone.head)
    request = StabilityRequest(**{**QUICK, "limit": None, "attacks": ("fgsm",)})
    data = write_imagenet_a(tmp_path / "a")
    results = run_stability(open_target(model, data), request, CPU, out=tmp_path / "run").results
    assert results["clean"]["correct"] == RIGHT
    assert results["clean_among_all"]["correct"] == 0
    assert results["stability"]["random"]["accuracy"]["mean"] == RIGHT / 4
    assert sorted(columns(tmp_path / "run")["random:right"]) == [0] + [4] * RIGHT


def test_order_statistics_of_masks():
    right = np.array([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=bool)
    reported = over_masks(right)
    assert reported["curve"] == [0.25, 0.25, 0.5, 0.75]
    assert reported["mean"] == pytest.approx(7 / 16)
    assert (reported["worst"]["held"], reported["best"]["held"]) == (1, 3)
    assert reported["by_mask"] == {"lowest": 0.25, "highest": 0.5}
    assert reported["curve"][0] <= reported["mean"] <= reported["curve"][-1]


def test_three_ways_to_compare_maps():
    clean = torch.eye(4)[None, None].repeat(1, 1, 1, 1)
    other = clean.clone()
    other[0, 0, 3] = torch.tensor([1.0, 0, 0, 0])  # the row of the center: 2 // 2 * 2 + 1
    assert map_similarity(clean, other, 1, "map", 0).item() == pytest.approx(3 / 4)
    assert map_similarity(clean, other, 1, "rows", 0).item() == pytest.approx(3 / 4)
    assert map_similarity(clean, other, 1, "centre", 0).item() == pytest.approx(0)
    two = clean.clone()
    two[0, 0, 3] *= 3  # rows of unequal size weigh unequally in a map only
    assert map_similarity(two, other, 1, "rows", 0).item() == pytest.approx(3 / 4)
    assert map_similarity(two, other, 1, "map", 0).item() == pytest.approx(3 / (12**0.5 * 2))
    windows = torch.cat([clean, clean])  # of one image
    assert map_similarity(windows, torch.cat([clean, other]), 1, "map", 0).tolist() == pytest.approx([7 / 8])
    assert map_similarity(windows, torch.cat([clean, other]), 2, "map", 0).tolist() == pytest.approx([1, 3 / 4])
    with pytest.raises(UserError, match="form no square"):
        map_similarity(clean, other, 1, "centre", 1)


def test_drift_is_relative():
    clean = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert drift(clean, clean + torch.tensor([[0.0, 5.0], [1.0, 0.0]])).tolist() == pytest.approx([1.0, 0.5])


def test_interval_of_a_mean():
    values = np.linspace(-0.2, 0.8, 300)
    reported, half = mean_with_interval(values), 1.959964 * values.std() / np.sqrt(300)
    assert (reported["mean"], reported["n"]) == (pytest.approx(0.3), 300)
    assert reported["ci95"] == pytest.approx([0.3 - half, 0.3 + half], abs=0.2 * half)
    assert mean_with_interval(np.array([0.3]))["ci95"] == [-1, 1]
    assert steps_below_one(0.43)[0] == pytest.approx(0.4)
    assert steps_below_one(1.0)[0] == pytest.approx(0.95)


def test_copies_of_the_evaluated_images_are_refused_before_anything_is_written(tmp_path):
    target, request = open_target(lively(), Shapes("test")), {**QUICK, "learned": True, "limit": 300}
    with pytest.raises(UserError, match="among the evaluated ones"):
        run_stability(target, StabilityRequest(**request, calibration="shapes@test"), CPU, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("settings", "reported"), [
    ({"share": 0}, "share is the share"), ({"watched": 9, "masks": 4}, "--watched must be from 1"),
    ({"similarity": "maps"}, "did you mean map"), ({"attacks": ("pdg-5",)}, "pgd"),
    ({"noise": "grey"}, "unknown noise"),
])  # fmt: skip
def test_orders_without_sense(settings, reported):
    with pytest.raises(UserError, match=reported):
        StabilityRequest(**settings)


@pytest.mark.slow
def test_attacks_beside_it_and_the_report(tmp_path, capsys):
    outcome = measured(lively(), tmp_path / "run", attacks=("pgd-5(step=0.5/255)",), learned=True, masks=3)
    run = read_run(tmp_path / "run")
    (attack,) = outcome.results["attacks"]
    assert attack["name"] == "pgd-5(step=0.5/255)"
    assert outcome.results["threat"]["eps_text"] == "1/255"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["suite"] == "stability"
    picture = draw_stability(run)
    nearness, accuracy, moved = picture.figure.axes
    curve = outcome.results["stability"]["random"]["accuracy"]["curve"]
    assert accuracy.lines[0].get_ydata().tolist() == pytest.approx([100 * each for each in curve])
    assert moved.lines[0].get_ydata().tolist() == outcome.results["stability"]["random"]["drift"]["median"]
    assert len(nearness.patches) == 3
    page = render([run])
    assert "Stability under noisy patches" in page
    assert "worst of 3" in page
    assert kind_of(run).sentence(run).startswith("Of 12 images")
    show_run(run.path)
    assert "worst of 3" in capsys.readouterr().out
    tables = stability_tables(outcome.results["stability"])
    assert "for random patches, 2 masks (others are chosen once)" in tables[1].caption
    assert [row[0] for row in tables[0].rows] == ["random", "learned"]
