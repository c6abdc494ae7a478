"""Perturbations of a linear model, which are the opposite pattern, shown to its twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from two_patterns import Faint, pattern, patterned

from toys import images
from vitadel.backbones.checkpoints import zoo_names
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target
from vitadel.reporting.kinds.study_perturbations import KIND, against_chance
from vitadel.reporting.read_runs import read_run
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.studies import reference_models
from vitadel.studies.perturbations import PerturbationsRequest, rescale, scatter, study_perturbations

CPU = join_processes("cpu")


def test_rescaled_as_in_the_thesis():
    change = torch.tensor([[-0.1, 0.0, 0.05, 0.1]])
    assert rescale(change, 0.1).tolist()[0] == pytest.approx([0, 0.5, 0.75, 1])
    assert rescale(torch.zeros(1, 4), 0.0).tolist() == [[0.5] * 4]
    assert rescale(change, 0.05).tolist()[0] == pytest.approx([0, 0.5, 1, 1])


def test_the_preset_of_the_thesis_has_the_steps_of_its_code():
    """1.5 eps / 100: at 4/255 a hundred steps of 0.06/255, which reach 6/255 in all; ours take 1/255."""
    paper, ours = (PerturbationsRequest(eps=4 / 255, preset=name).make() for name in ("paper", "ours"))
    assert paper.stepper.length == pytest.approx(0.06 / 255)
    assert paper.steps == 100
    assert not paper.stop_when_fooled
    assert paper.random_start
    assert ours.stepper != paper.stepper
    for settings in ({"attack": "cw-20"}, {"norm": "l2", "eps": 1.0}):
        with pytest.raises(UserError, match="the preset 'paper' is PGD-100 in Linf"):
            PerturbationsRequest(preset="paper", **settings)


def test_scattered_pixels_are_the_same_ones_elsewhere():
    change = images(2) - 0.5
    rng = SampleRNG.of_samples(0, [4, 7])
    moved = scatter(change, rng)
    assert not torch.equal(moved, change)
    for before, after in zip(change, moved, strict=True):
        assert sorted(map(tuple, before.flatten(1).T.tolist())) == sorted(map(tuple, after.flatten(1).T.tolist()))
    alone = scatter(change[1:], rng[torch.tensor([1])])
    assert torch.equal(alone[0], moved[1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference_models, "open_model", lambda spec: patterned(2.0))
        request = PerturbationsRequest(attack="pgd-10", others=("twin",), batch_size=3)
        study_perturbations(open_target(patterned(), Faint()), request, CPU, out=out)
    return read_run(out)


def test_a_twin_sees_the_other_class_in_every_perturbation(run):
    """An image 3 gray levels strong falls to a budget of 8, one of 20 holds; either way the change is the opposite."""
    reported = run.results["study"]
    assert (reported["n"], reported["k"], reported["chance"]["topk"]) == (8, 1, 0.5)
    assert (reported["fooled"]["fooled"], reported["fooled"]["n"]) == (4, 8)
    assert [entry["itself"] for entry in reported["models"]] == [True, False]
    for entry in reported["models"]:
        assert entry["clean"]["accuracy"] == 1
        assert (entry["label"]["perturbation"]["top1"]["right"], entry["label"]["dealt"]["top1"]["n"]) == (0, 8)
        assert entry["label"]["dealt"]["top1"]["accuracy"] == 0.5
        reached = entry["reached"]["perturbation"]["top1"]
        assert (reached["right"], reached["n"]) == (4, 4)
        assert entry["paper_style"] == entry["label"]["perturbation"]["topk"]


def test_the_picture_is_the_opposite_pattern(run):
    with np.load(run.path / "study.npz", allow_pickle=False) as arrays:
        changes, labels, reached = arrays["change"], arrays["label"], arrays["reached"]
    assert labels.tolist() == [0, 1] * 4
    assert reached.tolist() == [1, 0, 0, 1, 1, 0, 0, 1]
    for change, label in zip(changes, labels, strict=True):
        opposite = -pattern() if label == 0 else pattern()
        assert change.tolist() == (255 * (opposite > 0)).int().tolist()


def test_it_is_said_that_this_is_less_than_chance(run):
    assert "less often than by chance" in KIND.sentence(run)
    assert against_chance({"accuracy": 0.5}, {"ci95": [0.4, 0.6]}) == "no more than chance"
    assert against_chance({"accuracy": 0.7}, {"ci95": [0.4, 0.6]}) == "more often than by chance"


def test_models_that_cannot_be_compared(monkeypatch, tmp_path):
    target = open_target("zoo:shapes-standard", "shapes")
    others = [name for name in zoo_names() if name.startswith("zoo:shapes-") and name != "zoo:shapes-standard"]
    assert "zoo:shapes-robust" in others
    assert [model.name for model in reference_models.open_reference_models(target, ())] == [
        "zoo:shapes-standard",
        *others,
    ]
    with pytest.raises(UserError, match="twice"):
        reference_models.open_reference_models(target, ("zoo:shapes-robust", "zoo:shapes-robust"))
    with pytest.raises(UserError, match="classes"):
        reference_models.open_reference_models(target, ("vit_tiny_patch16_224=random",))
    assert [model.name for model in reference_models.open_reference_models(open_target(patterned(), Faint()), ())] == [
        "wrapped"
    ]
    renamed = replace(target, data_spec="svhn")  # ten classes as well, but of other things
    assert [model.name for model in reference_models.open_reference_models(renamed, ())] == ["zoo:shapes-standard"]
