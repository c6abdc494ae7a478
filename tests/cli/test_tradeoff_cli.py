"""`vitadel trade-off`, as a person would call it."""

from __future__ import annotations

import json

import pytest
import yaml
from typer.testing import CliRunner

from toras import MEAN, STD, enlivened
from vitadel.adapters.tora import Tora
from vitadel.adapters.tora_files import save_fusion, save_tora
from vitadel.adapters.tora_settings import ToraSettings
from vitadel.backbones.load import load_model
from vitadel.backbones.record import save_classifier
from vitadel.cli.main import app
from vitadel.errors import Mistake

KWARGS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
SHORT = [
    "--data",
    "shapes(size=32)",
    "--limit",
    "30",
    "--batch-size",
    "32",
    "--eps",
    "2/255",
    "--attacks",
    "fgsm",
    "--aimed",
    "fgsm",
]
SHORT += ["--device", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What a baseline, phase 1 and two lambdas of phase 2 leave behind, as far as opening needs it."""
    folder = tmp_path_factory.mktemp("runs")
    weights = folder / "pretrained.safetensors"
    made = {"num_classes": 10, "mean": MEAN, "std": STD, "kwargs": KWARGS}
    save_classifier(load_model("vit_tiny_patch16_224", weights="random", **made), weights)
    opened = load_model(str(weights))

    def write(name, tora, save, **adapter):
        run = folder / name
        run.mkdir()
        recipe = {"model": {"name": str(weights)}, "adapter": {"use": "tora", **adapter}}
        (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        save(tora, run / "weights" / "best.safetensors")
        return str(run)

    tora = enlivened(Tora(opened, ToraSettings(reduction=8)), scale=0.1)
    start = write("phase-1", tora, save_tora)
    found = []
    for trade in (0.1, 0.9):
        tora.trade_off = trade
        found.append(write(f"lambda-{trade}", tora, save_fusion, start=start))
    single = enlivened(Tora(opened, ToraSettings("single", reduction=8), trade_off=0.5), scale=0.1)
    return [*found, write("single-0.5", single, save_tora)]


def called(*words):
    return CliRunner().invoke(app, ["trade-off", *map(str, words)])


def test_two_lambdas_a_baseline_and_a_knob(runs, tmp_path):
    out = tmp_path / "run"
    words = [*runs, *SHORT, "--knob", 1, "--maps", 2, "--out", out]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    told = json.loads((out / "results.json").read_text())["trade_off"]
    assert [entry["name"] for entry in told["contenders"]] == [
        "lambda-0.1",
        "lambda-0.9",
        "single-0.5",
        "lambda-0.1 to lambda-0.9 at 0.5",
    ]
    assert [entry["kind"] for entry in told["contenders"]] == ["tora", "tora", "single", "tora"]
    assert [entry["name"] for entry in told["maps"]["contenders"]] == ["lambda-0.1", "lambda-0.9"]
    # the two fusions are the same file but for lambda, so that their verdicts agree
    first, second = ([each["held"] for each in entry["attacks"]] for entry in told["contenders"][:2])
    assert first == second
    assert "Trade-off of accuracy and robustness" in (out / "report.html").read_text()
    assert (out / "figures" / "trade-off.png").exists()
    again = called(*words, "--resume", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["trade_off"] == told


def test_a_mistake_is_told_before_anything_is_opened(runs, tmp_path):
    done = called("nowhere", "--eps", "4/255,1/255", "--out", tmp_path / "run")
    assert isinstance(done.exception, Mistake)
    assert "the smallest first" in str(done.exception)
    done = called(runs[0], *SHORT, "--knob", 2, "--out", tmp_path / "run")
    assert "--knob goes from one fusion to another" in str(done.exception)
    assert not (tmp_path / "run").exists()
