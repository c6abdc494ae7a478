"""`vitadel attack`: adversarial images on disk, and what 8 bits do to them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitadel
from command_line import vitadel as run_program
from vitadel.evaluation.audit.saved_examples import in_8_bits


def test_8_bits_round_towards_the_clean_image():
    x = torch.tensor([100, 100, 100, 100, 0, 255]).view(1, 1, 1, 6) / 255
    z = torch.tensor([101.8, 98.2, 100.0, 102.0, 0.4, 254.4]).view(1, 1, 1, 6) / 255
    assert in_8_bits(z, x).flatten().tolist() == [101, 99, 100, 102, 0, 255]


@pytest.mark.slow
def test_examples_are_misclassified_and_robust_images_of_the_strongest_attack(tmp_path):
    settings = {"attacks": ["pgd-5", "fgsm"], "independent": True, "limit": 60, "eps": 8 / 255}
    results = vitadel.audit("zoo:shapes-robust", "shapes", out=tmp_path / "run", **settings)
    strongest = min(results["attacks"], key=lambda entry: entry["held"])["name"]
    assert strongest == "pgd-5"
    with np.load(tmp_path / "run" / "examples.npz") as examples:
        assert str(examples["attack"]) == strongest
        robust = examples["label"] == examples["prediction"]
        assert 0 < robust.sum() < len(robust) == 8
        samples = pq.read_table(tmp_path / "run" / "samples.parquet").to_pydict()
        held = dict(zip(samples["index"], samples["held:pgd-5"], strict=True))
        assert [held[index] for index in examples["index"].tolist()] == robust.tolist()


@pytest.mark.slow
def test_images_on_disk_are_what_was_judged(tmp_path):
    out = tmp_path / "run"
    command = ["attack", "--limit", "12", "--eps", "16/255", "--attacks", "fgsm,pgd-3"]
    done = run_program(*command, "--png", "--out", str(out))
    assert done.stdout.strip().splitlines()[-1] == str(out)
    results = json.loads((out / "results.json").read_text())
    model = vitadel.load_model("zoo:shapes-robust").eval()
    held = pq.read_table(out / "samples.parquet").to_pydict()
    rows = zip(held["index"], held["clean_correct"], held["held:pgd-3"], strict=True)
    fell = {index for index, correct, last in rows if correct and not last}
    files = [load_file(path) for path in sorted((out / "adversarial").iterdir())]
    found = {int(index) for file in files for index in file["index"]}
    assert found == fell
    assert results["kept"]["images"] == len(found) > 0
    undone = 0
    assert len(list((out / "png").iterdir())) == len(found)
    for file in files:
        assert (file["images"] - file["clean"]).abs().max() <= 16 / 255 + 1e-6
        with torch.no_grad():
            assert torch.equal(model(file["images"]).argmax(1), file["prediction"])
        assert (file["prediction"] != file["label"]).all()
        for row, index in enumerate(file["index"].tolist()):
            label, seen = (results["data"]["class_names"][int(file[name][row])] for name in ("label", "prediction"))
            (path,) = (out / "png").glob(f"{index:06d}-{label}-as-{seen}-*.png")
            picture = np.asarray(Image.open(path))
            pixels = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None] / 255
            assert (pixels - file["clean"][row]).abs().max() <= 16 / 255 + 1e-6
            with torch.no_grad():
                undone += int(model(pixels).argmax(1) == file["label"][row])
    assert results["kept"]["undone_by_8_bits"] == undone
