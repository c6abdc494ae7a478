"""Runs on published models: beside the published numbers, with what was assumed about foreign files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from command_line import vitadel
from vitadel.backbones import published as catalogue
from vitadel.backbones.checkpoints import build_classifier
from vitadel.backbones.published import find_published
from vitadel.evaluation.audit.audit import AuditRequest
from vitadel.evaluation.audit.clean_accuracy import known_accuracy
from vitadel.evaluation.audit.published_numbers import compare_with_published
from vitadel.statistics import share

NAME = "mimir-cifar-10-vit-t"  # published: clean 84.82, AutoAttack 52.96 at linf 8/255
PUBLISHED = find_published(NAME)


def compare(
    correct: int, held: int, n: int = 1000, *, data: str = "cifar10", name: str = NAME, **request: Any
) -> dict[str, Any]:
    target = target_of(name, data)
    asked = AuditRequest(**{"attacks": ("autoattack",), "eps": 8 / 255, **request})
    entries = [{"name": each, **share(held, n, "held", "robust_accuracy")} for each in asked.attacks]
    results = {"clean": share(correct, n, "correct", "accuracy"), "attacks": entries}
    return dict(compare_with_published(target, asked, results)["published"])


def target_of(name: str, data: str) -> Any:
    record = find_published(name).record()
    return SimpleNamespace(
        model_spec=f"published:{name}",
        model=SimpleNamespace(record=record),
        source=SimpleNamespace(classes=["x"] * (record.num_classes or 0)),
        data_spec=data,
        given_as_object=False,
    )


def test_the_check_of_clean_accuracy_knows_the_published_one() -> None:
    known = known_accuracy(target_of(NAME, "cifar10"))
    assert known is not None
    assert (known.accuracy, known.exact) == (0.8482, True)
    assert "arXiv:2312.04960" in known.source
    assert known_accuracy(target_of(NAME, "cifar100")) is None


def test_numbers_inside_the_interval_are_consistent() -> None:
    found = compare(848, 530)
    assert found["consistent"] is True
    assert (found["clean"], found["robust"]) == (0.8482, 0.5296)
    assert found["sentences"] == [
        "clean: published 84.82; here 84.8 (82.4 to 86.9): consistent",
        "autoattack, linf 8/255: published 52.96; here 53.0 (49.9 to 56.1): consistent",
    ]


@pytest.mark.parametrize(("correct", "held", "said"), [(700, 530, "clean"), (848, 400, "autoattack")])
def test_numbers_below_the_published_are_called_so(correct: int, held: int, said: str) -> None:
    found = compare(correct, held)
    assert found["consistent"] is False
    (text,) = [text for text in found["sentences"] if "more than chance" in text]
    assert text.startswith(said)
    assert text.endswith("below the published by more than chance: check weights, preprocessing, images")
    assert "above the published by more than chance" in str(compare(848, 700))


def test_only_the_same_threat_and_attack_are_compared() -> None:
    found = compare(848, 530, eps=4 / 255)
    assert found["consistent"] is True  # clean accuracy alone
    assert found["sentences"][1] == "robust accuracy is not compared: it was published for linf, eps 8/255."
    assert "autoattack was not run" in compare(848, 530, attacks=("pgd-20",))["sentences"][1]
    assert "ran after fgsm" in compare(848, 530, attacks=("fgsm", "autoattack"))["sentences"][1]
    assert compare(848, 530, attacks=("fgsm", "autoattack"), independent=True)["consistent"] is True


def test_other_images_are_not_compared() -> None:
    found = compare(848, 530, data="cifar100")
    assert found["consistent"] is None
    assert found["sentences"] == ["nothing is compared: the published numbers are for cifar10, not cifar100."]
    assert compare(848, 530, data="parquet:x.parquet")["sentences"][-1] == (
        "This takes parquet:x.parquet for images of cifar10."
    )


def test_the_best_known_number_stands_beside_autoattack() -> None:
    found = compare(779, 596, data="imagenet:x", name="Amini2024MeanSparse_ConvNeXt-L", eps=4 / 255)
    assert found["consistent"] is True
    assert found["best_known"] == 0.5822
    assert found["sentences"][-1].startswith("Best known: 58.22, lower than autoattack (59.64). best known by APGD")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny 'published' model, its weights and images that it classifies at random."""
    tiny = replace(
        PUBLISHED,
        kwargs={"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 24, "num_heads": 3, "global_pool": "avg"},
        parameters=0,
    )
    monkeypatch.setattr(catalogue, "catalogue", lambda: (tiny,))
    torch.manual_seed(0)
    torch.save(build_classifier(tiny.record()).backbone.state_dict(), tmp_path / "w.pth")
    images = np.random.default_rng(0).integers(0, 255, (40, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(40) % 10)
    return tmp_path


def test_an_audit_says_it_in_terminal_results_and_report(small: Path) -> None:
    words = ("--data", "npz:images.npz", "--attacks", "fgsm", "--no-precheck", "--out", "run")
    said = vitadel("audit", f"published:{NAME}", "--weights", "w.pth", *words, cwd=small)
    assert "clean: published 84.82; here" in said.stdout
    assert "below the published by more than chance: check weights, preprocessing, images" in said.stdout
    results = json.loads((small / "run" / "results.json").read_text("utf-8"))
    assert results["published"]["consistent"] is False
    assert results["published"]["clean"] == 0.8482
    assert results["assumptions"] == []
    page = (small / "run" / "report.html").read_text("utf-8")
    assert "Beside the published numbers" in page
    assert "below the published by more than chance" in page


@pytest.mark.slow
def test_assumptions_about_a_foreign_file_are_recorded_and_shown(small: Path) -> None:
    kwargs = ("img_size=32", "patch_size=16", "depth=1", "embed_dim=24", "num_heads=3", "global_pool=avg")
    flags = [word for pair in kwargs for word in ("--model-kwargs", pair)]
    words = (*flags, "--num-classes", "10", "--data", "npz:images.npz", "--attacks", "fgsm", "--no-precheck")
    name = "vit_tiny_patch16_224"
    said = vitadel("audit", name, "--weights", "w.pth", *words, "--out", "run", cwd=small)
    assert "assumed: mean and std 0.5 and crop 0.9, bicubic" in said.stderr
    results = json.loads((small / "run" / "results.json").read_text("utf-8"))
    (assumed,) = results["assumptions"]
    assert "'w.pth' does not say how it was trained" in assumed
    assert "Assumptions" in (small / "run" / "report.html").read_text("utf-8")
    raw = ("--no-normalize", "--crop-pct", "1", "--crop-mode", "squash", "--out", "raw")
    said = vitadel("audit", name, "--weights", "w.pth", *words, *raw, cwd=small)
    assert "assumed" not in said.stderr
    assert json.loads((small / "raw" / "results.json").read_text("utf-8"))["assumptions"] == []


@pytest.mark.slow
def test_a_tower_without_classes_is_not_audited(tmp_path: Path) -> None:
    said = vitadel("audit", "published:fare1-clip-vit-b-32-openai", "--weights", "random", cwd=tmp_path, code=2)
    assert "gives an image embedding of 512 numbers, not class scores" in said.stderr
