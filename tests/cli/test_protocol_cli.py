"""`audit --protocol`: the name fills in what it asks for, and is refused with everything that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from command_line import vitadel
from vitadel.errors import UserError
from vitadel.runtime.opening import Opening


def printed(*words: str, cwd: Path, code: int) -> str:
    said = vitadel(*words, cwd=cwd, code=code)
    return " ".join((said.stdout + said.stderr).split())


def test_a_name_is_refused_with_all_differences_and_nothing_is_written(tmp_path):
    own = ("--data=shapes", "--limit=20", "--eps=4/255")
    text = printed("audit", "--protocol=robustbench-cifar10", *own, cwd=tmp_path, code=2)
    assert "data: shapes instead of cifar10" in text
    assert "images: 20 instead of 10,000" in text
    assert "eps: 4/255 instead of 8/255" in text
    assert "attacks:" not in text  # these the name has filled in
    assert not (tmp_path / "runs").exists()


def test_missing_data_and_misspelt_names(tmp_path):
    assert "needs --data imagenet:DIR, the whole" in printed("audit", "--protocol=rvt", cwd=tmp_path, code=2)
    assert "did you mean rvt" in printed("audit", "--protocol=rtv", cwd=tmp_path, code=2)
    idle = printed("audit", "--protocol=rvt", "--suite=stability", cwd=tmp_path, code=2)
    assert "'vitadel stability' has no --protocol; 'vitadel audit' has." in idle


@pytest.mark.slow
def test_a_protocol_says_how_images_come_to_their_size(tmp_path):
    for name in ("n01440764", "n01855672"):
        folder = tmp_path / "imagenet" / "val" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (260, 240)).save(folder / "0.JPEG")
    model = ("vit_tiny_patch16_224", "--weights=random", "--num-classes=1000")
    words = ("audit", *model, "--protocol=rvt", "--data=imagenet:imagenet")
    text = printed(*words, cwd=tmp_path, code=2)
    assert "images: 2 instead of 50,000" in text
    assert "preprocessing" not in text  # timm's own would be a crop of 0.9
    text = printed(*words, "--crop-pct=0.9", cwd=tmp_path, code=2)
    assert "preprocessing: shorter side to 248 pixels (bicubic), then the central 224 x 224 instead of shorter" in text
    text = printed(*words, "--interpolation=cubic", cwd=tmp_path, code=2)
    assert "unknown interpolation 'cubic'" in text


def test_protocols_are_listed(tmp_path):
    text = printed("list", "protocols", cwd=tmp_path, code=0)
    assert "robustbench-imagenet autoattack, linf 4/255, 5,000 images of imagenet" in text


def test_how_a_protocol_opens_the_model_is_recorded(monkeypatch, tmp_path):
    """So that studies and further commands open the model as the audit did."""
    opened = []

    def stop(opening: Opening, **_: object) -> None:
        opened.append(opening)
        raise UserError("opened")

    monkeypatch.setattr("vitadel.evaluation.engine.target.open_as", stop)
    words = ("audit", "zoo:shapes-robust", "--protocol=rvt", "--data=shapes", "--interpolation=nearest")
    printed(*words, cwd=tmp_path, code=2)
    assert (opened[0].crop_pct, opened[0].interpolation) == (0.875, "nearest")
