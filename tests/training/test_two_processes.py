"""Two processes with half the batch each take the same optimizer steps as one, up to the order of additions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from new_processes import program, run_together
from small_recipes import TRADES, document
from vitadel.backbones.checkpoints import save_classifier
from vitadel.backbones.load import load_model
from vitadel.runtime.distributed import join_processes
from vitadel.training.recipes.build import build_recipe
from vitadel.training.run import run_harden

TRAINING = {"train": {"epochs": 2}, "schedule": {"warmup_epochs": 0.0}, "optimizer": {"name": "sgd", "lr": 0.5}}
NO_AUDIT = {"test": None}
TORA = {"use": "tora", "reduction": 8}
XCIT = {
    "name": "xcit_nano_12_p16_224",
    "mean": None,
    "std": None,
    "small_images": 4,
    "input_size": 16,
    "kwargs": {"img_size": None, "patch_size": None, "mlp_ratio": None, "embed_dim": 16, "depth": 1, "num_heads": 2},
}


def trained_by_two(recipe, folder, *words, ends_well=True, **environment):
    file = folder / "recipe.yaml"
    folder.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(recipe))
    trust = {"VITADEL_TRUST_CODE": "1", **environment}
    words = ["harden", str(file), "--device", "cpu", "--out", str(folder / "run"), *words]
    return folder / "run", run_together(program, *words, code=0 if ends_well else 130, environment=trust)


def trained_here(recipe, folder):
    _, run, _ = run_harden(build_recipe(recipe, "small"), "small", join_processes("cpu"), out=folder)
    return run.path


def by_one_and_two(recipe, folder):
    return trained_here(recipe, folder / "one"), trained_by_two(recipe, folder)[0]


def weights(folder):
    return load_file(folder / "weights" / "last.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "plugins", "data"),
    [
        ({"use": "adversarial", "attack": "pgd-2(step=5/255)"}, {}, {}),
        (TRADES, {"awp": {"gamma": 0.01}, "attention_scaling": {"gap": 1, "images": 32, "steps": 2}}, NO_AUDIT),
        ({"use": "afat", "weight": 0.5, "share": 0.3, "lr": 0.05}, {}, NO_AUDIT),
    ],
    ids=["adversarial", "trades+awp+aas", "afat"],
)
def test_two_processes_take_the_steps_of_one(tmp_path, objective, plugins, data):
    recipe = document(objective=objective, plugins=plugins, data=data, **TRAINING)
    one, two = by_one_and_two(recipe, tmp_path)
    first, second = weights(one), weights(two)
    still = {"optimizer": {**recipe["optimizer"], "lr": 1e-12}, "data": {**recipe["data"], **NO_AUDIT}}
    untrained = trained_here({**recipe, **still}, tmp_path / "untrained")
    assert any(not torch.allclose(value, weights(untrained)[key], atol=1e-2) for key, value in first.items())
    for key, value in first.items():
        assert torch.allclose(value, second[key], atol=1e-4), key
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)]
    assert len(rows[0]) == len(rows[1]) == 8
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, abs=1e-3, rel=1e-3)
    if objective["use"] == "afat":
        selectors = [load_file(run / "weights" / "corruption-model.safetensors") for run in (one, two)]
        assert all(torch.allclose(value, selectors[1][key], atol=1e-4) for key, value in selectors[0].items())
    if plugins:
        factors = [json.loads(_record(run))["attention_factors"] for run in (one, two)]
        assert factors[0] == pytest.approx(factors[1], rel=1e-3)
        assert any(factor != 1 for factor in factors[0])


@pytest.mark.slow
def test_tora_in_two_processes_learns_what_one_learns(tmp_path):
    """Phase 1, whose masked gradients must be averaged like any others, and phase 2, where the fusion alone learns."""
    small, file = document()["model"], tmp_path / "pretrained.safetensors"
    made = {"weights": "random", "num_classes": 10, "mean": (0.5,), "std": (0.5,), "kwargs": small["kwargs"]}
    save_classifier(load_model(small["name"], **made), file)
    model = {"weights": str(file)}
    base = {
        "objective": {"use": "tora", "attack": "pgd-2(step=5/255)"},
        "model": model,
        "data": NO_AUDIT,
        **TRAINING,
        "adapter": TORA,
    }
    runs = by_one_and_two(document(**base), tmp_path / "phase 1")
    second = document(**{**base, "adapter": {**TORA, "start": str(runs[0]), "trade_off": 0.6}})
    fused = by_one_and_two(second, tmp_path / "phase 2")
    for (one, two), before in ((runs, None), (fused, runs[0])):
        first, other = weights(one), weights(two)
        for key, value in first.items():
            assert torch.allclose(value, other[key], atol=1e-4), key
        if before is not None:
            start = load_file(before / "weights" / "best.safetensors")
            changed = {key.partition(".")[0] for key, value in first.items() if not torch.equal(value, start[key])}
            assert changed == {"fusion"}
    learned = {key.partition(".")[0] for key, value in weights(runs[0]).items() if value.abs().max() > 0}
    assert learned == {"acc", "rob", "fusion"}
    assert weights(runs[0])["rob.adapters.0.up.weight"].abs().max() > 1e-3  # it starts at 0


def _record(run: Path) -> str:
    from safetensors import safe_open

    with safe_open(run / "weights" / "last.safetensors", "pt") as file:
        return file.metadata()["vitadel"]


@pytest.mark.slow
def test_batch_norm_in_two_processes_and_control_c_in_one_of_them(tmp_path):
    """Both end at the same step, and go on with their own statistics to the same bits."""
    plugins = {"stopping.ControlC": {"at_step": 2, "rank": 1}}
    recipe = document(objective=TRADES, model=XCIT, train={"epochs": 1}, plugins=plugins, data=NO_AUDIT)
    whole, reported = trained_by_two(recipe, tmp_path / "whole")
    assert "separately in 2 processes, averaged after every epoch" in reported
    cut, reported = trained_by_two(recipe, tmp_path / "cut", ends_well=False, CONTROL_C="1")
    assert "interrupted; finished work is saved" in reported
    assert torch.load(cut / "checkpoint.pt", weights_only=True)["step"] == 3
    trained_by_two(recipe, tmp_path / "cut", "--resume")
    first, second = weights(whole), weights(cut)
    assert all(torch.equal(first[key], second[key]) for key in first)
