"""`vitadel probe` as it is typed: tables that end with the folder, one clear message for a mistake."""

from __future__ import annotations

import json

import pytest
import yaml

from command_line import call
from small_probes import LINEAR, MASKS


@pytest.fixture
def recipes(tmp_path):
    for name, document in (("linear", LINEAR), ("masks", MASKS)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    return tmp_path


@pytest.mark.slow
def test_a_probe_ends_with_heads_accuracies_and_its_folder(recipes):
    out = recipes / "run"
    code, text, err = call("probe", recipes / "linear.yaml", "train.seed=1", "--out", out, "--device", "cpu")
    assert code == 0, err
    assert text.splitlines()[-1] == str(out)
    assert "8 heads, 20 steps of 32, trained on 120 images, chosen on 40 held-out ones" in " ".join(text.split())
    assert "95 % interval" in text
    assert "160 images once through the model" in err
    assert "at most 1 gradients each under fgsm" in err
    assert "heads: 20/20" in err
    assert {file.name for file in out.iterdir()} >= {"recipe.yaml", "results.json", "samples.parquet", "report.html"}


@pytest.mark.slow
def test_a_segmentation_ends_with_both_means_and_its_folder(recipes):
    out = recipes / "run"
    code, text, err = call("probe", recipes / "masks.yaml", "--out", out, "--device", "cpu")
    assert code == 0, err
    assert text.splitlines()[-1] == str(out)
    assert "per image (legacy)" in text
    clean = json.loads((out / "results.json").read_text())["segmentation"]["clean"]
    low, high = clean["mean_iou_ci95"]
    assert f"{100 * clean['mean_iou']:.1f} ({100 * low:.1f} to {100 * high:.1f})" in text
    assert "2 heads in 20 steps of 16; then 12 test images of 16 x 16, 3 gradients each under pgd-3" in err
    code, again, err = call("probe", recipes / "masks.yaml", "--out", out, "--device", "cpu", "--resume", "--json")
    assert code == 0, err
    assert json.loads(again)["segmentation"]["clean"] == clean


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe", "probes/shape"], "did you mean probes/shapes"),
        (["probe", "shapes/trades"], "run it with `vitadel harden`"),
        (["harden", "probes/shapes"], "run it with `vitadel probe`"),
        (["plan", "segmentation/shapes"], "run it with `vitadel probe`"),
        (["probe", "probes/paper"], "choose one of its rows with --row: dinov2-s"),
        (["probe", "probes/shapes", "train.step=3"], "did you mean steps"),
        (["probe", "probes/shapes", "--tokens", "missing.safetensors"], "does not exist"),
        (["probe", "segmentation/shapes", "data.size=[30,32]"], "cannot be cut into patches"),
    ],
)
def test_user_errors_end_with_one_message(tmp_path, words, message):
    out = [] if words[0] == "plan" else ["--out", tmp_path / "run"]
    code, shown, err = call(*words, *out, "--device", "cpu")
    assert (code, shown) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()
