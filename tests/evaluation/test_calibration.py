"""Which images an attack may study: never the audited ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vitadel.attacks import make
from vitadel.attacks.attention_scaling.aas import AAS, Rescaled
from vitadel.attacks.wrappers import Targeted
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.evaluation.audit.audit import audit
from vitadel.evaluation.engine.target import CALIBRATION_BATCH, CalibrationImages, calibration_images, open_target


def test_a_named_set_lends_its_training_split():
    for name in ("shapes", "shapes@test", "shapes@val"):
        target = open_target("zoo:shapes-robust", name)
        source, rows = calibration_images(target, torch.arange(10), None, 40, seed=0)
        assert isinstance(source, Shapes)
        assert source.split == "train"
        assert len(rows) == 40
        counts = source.labels()[rows].bincount()
        assert counts.max() - counts.min() <= 1


def test_other_data_can_be_named():
    target = open_target("zoo:shapes-robust", "shapes")
    source, _ = calibration_images(target, torch.arange(10), "shapes@val", 40, seed=0)
    assert source.split == "val"


@pytest.mark.parametrize("spec", ["shapes", "shapes@test", "shapes(agreement=0.9)@test"])
def test_the_audited_images_are_refused(spec):
    target = open_target("zoo:shapes-robust", "shapes")
    with pytest.raises(UserError, match="are the evaluated images"):
        calibration_images(target, torch.arange(10), spec, 40, seed=0)


def _folder_of(source: Shapes, rows: list[int], folder: Path) -> str:
    for row in rows:
        place = folder / "test" / source.classes[int(source.labels()[row])]
        place.mkdir(parents=True, exist_ok=True)
        source.read([row])[0].save(place / f"{row}.png")
    return f"folder:{folder}"


def test_copies_of_the_audited_images_are_refused(tmp_path):
    """Under another name, or beside data that were given as an object and have none."""
    source = Shapes("test")
    rows = [row for each in range(10) for row in (source.labels() == each).nonzero()[:2, 0].tolist()]
    given = _folder_of(source, rows, tmp_path / "given")
    copies = _folder_of(source, rows, tmp_path / "copies")
    half = _folder_of(source, [row + (place % 2) * 100 for place, row in enumerate(rows)], tmp_path / "half")
    asked = {"attacks": "aas(images=20,steps=1)+pgd-2", "limit": 20}
    with pytest.raises(UserError, match="20 of the 20 images that would be used are among the evaluated ones"):
        audit("zoo:shapes-robust", given, calibration=copies, **asked)
    with pytest.raises(UserError, match=r"10 of the \d+ images that would be used are among the evaluated ones"):
        audit("zoo:shapes-robust", given, calibration=half, **asked)
    with pytest.raises(UserError, match="among the evaluated ones"):
        audit("zoo:shapes-robust", source, calibration="shapes@test", **asked)


@pytest.mark.parametrize("data", [Shapes("test"), "shapes@train"])
def test_without_a_training_split_it_is_what_the_audit_leaves_out(data):
    target = open_target("zoo:shapes-robust", data)
    audited = torch.arange(0, len(target.source), 2)
    source, rows = calibration_images(target, audited, None, 50, seed=0)
    assert source is target.source
    assert len(rows) == 50
    assert not set(rows.tolist()) & set(audited.tolist())


def test_nothing_left_is_reported():
    target = open_target("zoo:shapes-robust", Shapes("test"))
    with pytest.raises(UserError, match="--calibration SPEC"):
        calibration_images(target, torch.arange(len(target.source)), None, 50, seed=0)


def test_batches_can_be_gone_through_again():
    target = open_target("zoo:shapes-robust", "shapes@val")
    images = CalibrationImages(
        target.source, torch.arange(CALIBRATION_BATCH + 6), target.preprocess, torch.device("cpu")
    )
    first, second = list(images), list(images)
    assert [len(y) for _, y in first] == [CALIBRATION_BATCH, 6]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_an_attack_is_prepared_also_inside_a_wrapper():
    attack = make("targeted:next+aas(images=8,steps=1)+pgd-2")
    assert isinstance(attack, Targeted)
    assert isinstance(attack.attack, AAS)
    results = audit(
        "zoo:shapes-robust", attacks=["targeted:next+aas(images=8,steps=1)+pgd-2"], limit=6, calibration="shapes@val"
    )
    assert "factors" in results["attacks"][0]["settings"]
    assert isinstance(attack.attack.prepared(*_model_and_images()), Rescaled)


def _model_and_images():
    target = open_target("zoo:shapes-robust", "shapes@val")
    return target.model, CalibrationImages(target.source, torch.arange(4), target.preprocess, torch.device("cpu"))
