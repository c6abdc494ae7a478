"""`audit --protocol`: the name fills in what it asks for, and is refused with everything that differs."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from command_line import vitadel
from vitadel.cli import options, run_verb
from vitadel.cli.audit import _opened_under
from vitadel.runtime.opening import recorded_opening


def told_by(*words: str, cwd: Path, code: int) -> str:
    said = vitadel(*words, cwd=cwd, code=code)
    return " ".join((said.stdout + said.stderr).split())


def test_a_name_is_refused_with_all_differences_and_nothing_is_written(tmp_path):
    own = ("--data=shapes", "--limit=20", "--eps=4/255")
    told = told_by("audit", "--protocol=robustbench-cifar10", *own, cwd=tmp_path, code=2)
    assert "data: shapes instead of cifar10" in told
    assert "images: 20 instead of 10,000" in told
    assert "eps: 4/255 instead of 8/255" in told
    assert "attacks:" not in told  # these the name has filled in
    assert not (tmp_path / "runs").exists()


def test_what_is_missing_or_misspelt_is_told(tmp_path):
    assert "needs --data imagenet:DIR, the whole" in told_by("audit", "--protocol=rvt", cwd=tmp_path, code=2)
    assert "did you mean rvt" in told_by("audit", "--protocol=rtv", cwd=tmp_path, code=2)
    idle = told_by("audit", "--protocol=rvt", "--suite=stability", cwd=tmp_path, code=2)
    assert "--protocol do not go with --suite stability" in idle


def test_a_protocol_says_how_images_come_to_their_size(tmp_path):
    for name in ("n01440764", "n01855672"):
        folder = tmp_path / "imagenet" / "val" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (260, 240)).save(folder / "0.JPEG")
    model = ("vit_tiny_patch16_224", "--weights=random", "--num-classes=1000")
    words = ("audit", *model, "--protocol=rvt", "--data=imagenet:imagenet")
    told = told_by(*words, cwd=tmp_path, code=2)
    assert "images: 2 instead of 50,000" in told
    assert "preprocessing" not in told  # timm's own would be a crop of 0.9
    told = told_by(*words, "--crop-pct=0.9", cwd=tmp_path, code=2)
    assert "preprocessing: shorter side to 248 pixels (bicubic), then the central 224 x 224 instead of shorter" in told
    told = told_by(*words, "--interpolation=cubic", cwd=tmp_path, code=2)
    assert "unknown interpolation 'cubic'" in told


def test_protocols_are_listed(tmp_path):
    told = told_by("list", "protocols", cwd=tmp_path, code=0)
    assert "robustbench-imagenet autoattack, linf 4/255, 5,000 images of imagenet" in told


def test_what_a_protocol_stands_for_is_kept_with_the_command(tmp_path, monkeypatch):
    """So that studies and further commands open the model as the audit did."""
    seen = {}
    monkeypatch.setattr(
        "vitadel.evaluation.audit.audit.run_audit", lambda *_, **kept: seen.update(kept) or Unfinished()
    )
    monkeypatch.setattr(sys, "argv", ["vitadel", "audit", "zoo:shapes-robust", "--protocol=rvt"])
    request = run_verb.request_of(options.Attacking("pgd-5"), options.Sampling("shapes"), options.Conduct())
    choice, words = _opened_under("rvt", options.Choice(), {"interpolation"})
    assert (choice.crop_pct, words) == (0.875, ["--crop-pct=0.875"])
    run_verb.run_attacks(
        "audit", request, "zoo:shapes-robust", choice, options.Sampling("shapes"), options.Running(), unsaid=words
    )
    assert seen["argv"] == [*sys.argv[1:], *words]
    assert recorded_opening({"verb": "audit", "argv": seen["argv"]}).crop_pct == 0.875


class Unfinished:
    is_main, folder = False, None
