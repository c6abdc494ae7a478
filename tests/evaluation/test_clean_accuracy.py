"""Whether a clean accuracy makes sense: chance, what is known, one class for all, another set-up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import vitadel
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.timm_models import published_top1
from vitadel.evaluation.audit.alternatives import Fit, best_alternative, other_labels, try_alternatives
from vitadel.evaluation.audit.clean_accuracy import (
    Known,
    findings_about_accuracy,
    findings_about_training,
    known_accuracy,
)
from vitadel.evaluation.audit.evidence import without_reassurance
from vitadel.evaluation.engine.target import open_target
from vitadel.statistics import chance_level

LABELS = torch.arange(200) % 10


def right_on(count: int, label: Tensor = LABELS) -> Tensor:
    """Predictions that are right on the first images, and one class further on the others."""
    return torch.where(torch.arange(len(label)) < count, label, (label + 1) % 10)


def checks(found) -> dict[str, str]:
    return {each.check: each.verdict for each in found}


@pytest.mark.parametrize(
    ("right", "known", "expected"),
    [
        (190, None, {}),
        (60, None, {}),  # weak, and clearly no guess
        (22, None, {"clean-accuracy": "broken"}),
        (0, None, {"clean-accuracy": "broken"}),
        (190, Known(0.97, "x", exact=True), {}),
        (150, Known(0.97, "x", exact=True), {"known-accuracy": "suspicious"}),
        (100, Known(0.97, "x", exact=True), {"known-accuracy": "broken"}),
        (150, Known(0.97, "x", exact=False), {}),  # perhaps robust weights
        (80, Known(0.97, "x", exact=False), {"known-accuracy": "suspicious"}),
        (20, Known(0.97, "x", exact=True), {"clean-accuracy": "broken"}),
    ],
)
def test_accuracy_against_chance_and_against_what_is_known(right, known, expected):
    assert checks(findings_about_accuracy(LABELS, right_on(right), known, 10)) == expected


def test_few_images_are_no_proof_of_either():
    few = findings_about_accuracy(LABELS[:5], right_on(1, LABELS[:5]), None, 10)
    assert checks(few) == {"clean-accuracy": "suspicious"}
    assert "too few images" in few[0].advice


def test_one_class_for_everything():
    constant = torch.full_like(LABELS, 3)
    assert checks(findings_about_accuracy(LABELS, constant, None, 10)) == {
        "constant-prediction": "broken",
        "clean-accuracy": "broken",
    }
    unbalanced = torch.where(torch.arange(200) < 195, 3, LABELS)  # the data are of one class themselves
    assert "constant-prediction" not in checks(findings_about_accuracy(unbalanced, constant, None, 10))


def test_chance_is_that_of_the_most_frequent_class():
    assert chance_level(LABELS.tolist(), 1000) == 0.1
    assert chance_level([0, 0, 0, 1], 10) == 0.75
    assert chance_level([2, 2], 10) == 0.1


def test_nothing_is_fine_if_the_clean_accuracy_is_not():
    fine, bad = {"check": "precheck", "verdict": "ok"}, {"check": "clean-accuracy", "verdict": "broken"}
    other = {"check": "eot", "verdict": "suspicious"}
    assert without_reassurance([fine, other]) == [fine, other]
    assert without_reassurance([bad, fine, other]) == [bad, other]


class Shades(nn.Module):
    """Knows ten colors by a lookup of the mean of what reaches it: right for one preprocessing only."""

    def __init__(self, mean=(0.0,) * 3, std=(1.0,) * 3):
        super().__init__()
        self.register_buffer("codes", (COLORS - torch.tensor(mean)) / torch.tensor(std))

    def forward(self, x):
        return -10 * torch.cdist(x.mean((2, 3)), self.codes)


COLORS = torch.rand(10, 3, generator=torch.Generator().manual_seed(4))
IMAGES = COLORS[LABELS][:, :, None, None].expand(-1, -1, 8, 8).contiguous()
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("model", "images", "name"),
    [
        (lambda: wrap(Shades(*IMAGENET)), IMAGES, "ImageNet's mean and std"),
        (lambda: wrap(Shades(*HALF)), IMAGES, "mean and std 0.5"),
        (lambda: wrap(Shades(), *IMAGENET), IMAGES, "raw pixels"),
        (lambda: wrap(Shades(*IMAGENET), *HALF), IMAGES, "ImageNet's mean and std"),
        (lambda: wrap(nn.Sequential(wrap(Shades(*HALF), *HALF)), *HALF), IMAGES, "raw pixels"),
        (lambda: wrap(Shades((0.0,) * 3, (1 / 255,) * 3)), IMAGES, "pixels in 0..255"),
        (lambda: wrap(Shades()), IMAGES.flip(1), "BGR channels"),
        (lambda: wrap(Shades(), *HALF), IMAGES, "raw pixels"),
    ],
)
def test_the_alternative_that_fits_is_named(model, images, name):
    logits, fits = try_alternatives(model().eval(), images, LABELS)
    best = best_alternative(fits, logits.argmax(1) == LABELS)
    assert best is not None
    assert best.name == name
    assert best.accuracy == 1


def test_no_alternative_is_named_for_a_model_that_is_right():
    logits, fits = try_alternatives(wrap(Shades(*HALF), *HALF), IMAGES, LABELS)
    as_given = logits.argmax(1) == LABELS
    assert as_given.all()
    assert best_alternative(fits, as_given) is None


@pytest.mark.parametrize(
    ("n", "share", "more", "decided"),
    [(64, 1.0, 1.0, True), (12, 1.0, 1.0, False), (64, 0.6, 1.0, False), (64, 1.0, 0.01, False), (64, 0.8, 1.0, True)],
)
def test_likelier_labels_decide_where_the_accuracy_is_the_same(n, share, more, decided):
    """Two classes, all right with a margin of 1; the alternative adds `more` to that of a share of the images."""
    y = torch.zeros(n, dtype=torch.int64)
    as_given = torch.tensor([[1.0, 0.0]]).repeat(n, 1)
    other = as_given.clone()
    other[:, 0] += torch.where(torch.arange(n) < share * n, more, -0.2 * more)
    fit = Fit.of("another", other, y, as_given, "")
    assert fit.accuracy == 1
    assert (best_alternative([fit], as_given.argmax(1) == y) is not None) == decided


def test_labels_that_mean_something_else():
    permutation = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    fit, rows = other_labels(LABELS, permutation[LABELS])
    assert (fit.name, fit.accuracy, int(rows.sum())) == ("classes in another order", 1.0, 100)
    assert "label 0 is 3, 2 is 4, 3 is 0, ..." in fit.remedy
    swapped = torch.arange(10)
    swapped[[2, 7]] = torch.tensor([7, 2])
    assert other_labels(LABELS, swapped[LABELS])[0].name == "classes in another order"
    assert other_labels(LABELS + 1, LABELS)[0].name == "labels counted from 1"
    assert other_labels(LABELS, LABELS) is None
    guesses = torch.randint(10, (200,), generator=torch.Generator().manual_seed(0))
    assert other_labels(LABELS, guesses) is None
    assert other_labels(LABELS[:10], permutation) is None  # one image of each class proves nothing


def test_what_is_known_of_a_model():
    assert published_top1("deit_tiny_patch16_224") == published_top1("deit_tiny_patch16_224.fb_in1k") == 0.722
    assert published_top1("rvt_tiny") is None
    target = open_target("zoo:shapes-robust", "shapes")
    assert known_accuracy(target) is None
    training = {"clean": 0.9, "n": 500, "data": "shapes@val", "trained_on": "shapes@train"}
    record = replace(target.model.record, training=training)
    known = known_accuracy(replace(target, model=Classifier(target.model.backbone, record)))
    assert known == Known(0.9, "on 500 held-out images of its training (shapes@val)", exact=True)
    assert ModelRecord.from_json(record.to_json()).training == training


def test_an_audit_says_so_first():
    model = wrap(Shades(*IMAGENET))
    results = vitadel.audit(model, (IMAGES, LABELS), attacks=["fgsm"], eps=1 / 255)
    first = results["findings"][0]
    assert first["verdict"] == "broken"
    assert {each["check"] for each in results["findings"]} >= {"better-set-up"}
    assert "100.0 % with ImageNet's mean and std" in next(
        each["evidence"] for each in results["findings"] if each["check"] == "better-set-up"
    )
    assert not [each for each in results["findings"] if each["verdict"] == "ok"]
    assert vitadel.audit(wrap(Shades().eval()), (IMAGES, LABELS), attacks=["fgsm"], eps=1 / 255)["findings"] == []


def test_training_splits_are_named():
    results = vitadel.audit("zoo:shapes-robust", "shapes@train", attacks=["fgsm"], limit=20)
    assert [each["check"] for each in results["findings"]] == ["training-images"]


def test_what_speaks_against_a_training():
    def found(clean, robust=None, results=None):
        return {each["check"]: each["verdict"] for each in findings_about_training(LABELS, clean, robust, 10, results)}

    good = {"clean": {"correct": 190, "n": 200, "accuracy": 0.95}, "findings": []}
    bad = {"clean": {"correct": 120, "n": 200, "accuracy": 0.6}, "findings": []}
    assert found(0.95, 0.4, good) == {}
    assert found(0.1, 0.1) == {"clean-accuracy": "broken"}
    assert found(0.6, 0.7) == {"robust-above-clean": "broken"}
    assert found(0.95, 0.4, bad) == {"known-accuracy": "broken"}
    raised = {**bad, "findings": [{"check": "known-accuracy", "verdict": "broken"}]}
    assert found(0.95, 0.4, raised) == {}  # said already


class FirstChannel(nn.Module):
    """Reads the label from the first color."""

    def forward(self, x):
        label = (10 * x[:, 0].mean((1, 2))).round().long().clamp(0, 9)
        return nn.functional.one_hot(label, 10).to(x.dtype) + 0 * x.mean((1, 2, 3))[:, None]


@pytest.mark.parametrize(("n", "decided"), [(64, False), (400, True)])
def test_more_images_decide_where_a_few_cannot(n, decided):
    """Swapped channels set one image in ten right: 6 of 64 may be luck, 40 of 400 are none."""
    label, place = torch.arange(n) // 10 % 10, torch.arange(n) % 10
    wrong = (label + 1) % 10
    first, last = torch.where(place < 4, wrong, label), torch.where(place < 3, wrong, label)
    x = (torch.stack([first, label, last], 1) / 10)[:, :, None, None].expand(-1, -1, 8, 8)
    results = vitadel.audit(FirstChannel().eval(), (x, label), attacks=["fgsm"], eps=1 / 255)
    assert abs(results["clean"]["accuracy"] - 0.6) < 0.05
    found = {each["check"]: each["evidence"] for each in results["findings"]}
    assert ("with BGR channels, on 400 images" in found.get("better-set-up", "")) == decided
