"""`vitadel trade-off`, as a person would call it."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from typer.testing import CliRunner

import vitadel
from toras import MEAN, STD, enlivened
from vitadel.adapters.adapted_model import open_model
from vitadel.adapters.tora.tora_files import save_fusion, save_tora
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.backbones.checkpoints import save_classifier
from vitadel.backbones.load import load_model
from vitadel.cli.main import app
from vitadel.data.batches import read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import open_target

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
    for seed, trade in enumerate((0.1, 0.9), start=1):
        tora.trade_off = trade
        with torch.no_grad():
            for number, parameter in enumerate(tora.fusion.parameters()):
                parameter += seed * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        found.append(write(f"lambda-{trade}", tora, save_fusion, start=start))
    single = enlivened(Tora(opened, ToraSettings("single", reduction=8), trade_off=0.5), scale=0.1)
    return [*found, write("single-0.5", single, save_tora)]


def called(*words):
    return CliRunner().invoke(app, ["trade-off", *map(str, words)])


@pytest.mark.slow
def test_two_lambdas_a_baseline_and_a_knob(runs, tmp_path):
    out = tmp_path / "run"
    words = [*runs, *SHORT, "--knob", 1, "--maps", 2, "--out", out]
    done = called(*words)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == str(out)
    measured = json.loads((out / "results.json").read_text())["trade_off"]
    assert [entry["name"] for entry in measured["contenders"]] == [
        "lambda-0.1",
        "lambda-0.9",
        "single-0.5",
        "lambda-0.1 to lambda-0.9 at 0.5",
    ]
    assert [entry["kind"] for entry in measured["contenders"]] == ["tora", "tora", "single", "tora"]
    assert [entry["name"] for entry in measured["maps"]["contenders"]] == ["lambda-0.1", "lambda-0.9"]
    low, high, _, middle = (entry["fingerprint"] for entry in measured["contenders"])
    assert len({low, high, middle}) == 3
    # Each has its own fusion, and what was judged is what the folder holds.
    target = open_target(runs[0], "shapes(size=32)")
    samples = pq.read_table(out / "samples.parquet").to_pydict()
    (batch,) = read_batches(target.source, [samples["index"]], target.preprocess)
    answers = {}
    for name, run in zip(("lambda-0.1", "lambda-0.9", "single-0.5"), runs, strict=True):
        with torch.no_grad():
            answers[name] = open_model(run)(batch.x).argmax(1).tolist()
        assert samples[f"prediction:{name}"] == answers[name]
    assert answers["lambda-0.1"] != answers["lambda-0.9"]
    assert "Trade-off of accuracy and robustness" in (out / "report.html").read_text()
    assert (out / "figures" / "trade-off.png").exists()
    again = called(*words, "--resume", "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["trade_off"] == measured


def test_a_user_error_is_reported_before_anything_is_opened(runs, tmp_path):
    done = called("nowhere", "--eps", "4/255,1/255", "--out", tmp_path / "run")
    assert isinstance(done.exception, UserError)
    assert "the smallest first" in str(done.exception)
    done = called(runs[0], *SHORT, "--knob", 2, "--out", tmp_path / "run")
    assert "--knob goes from one fusion to another" in str(done.exception)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_from_python(runs, tmp_path):
    settings = {"data": "shapes(size=32)", "limit": 20, "attacks": "fgsm", "aimed": "", "device": "cpu"}
    results = vitadel.trade_off(runs[0], eps="1/255, 2/255", out=tmp_path / "run", **settings)
    assert results == json.loads((tmp_path / "run" / "results.json").read_text())
    assert [entry["name"] for entry in results["trade_off"]["contenders"]] == ["lambda-0.1"]
    both = vitadel.trade_off(runs[:2], eps=[2 / 255], knob=1, out=tmp_path / "both", **settings)
    assert len(both["trade_off"]["contenders"]) == 3
