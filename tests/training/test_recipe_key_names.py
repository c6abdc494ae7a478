"""Recipe keys of earlier versions: accepted everywhere, reported once, never silently mixed with the new ones."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from small_recipes import document, recipe
from vitadel.errors import Interrupted, UserError
from vitadel.runtime.distributed import join_processes
from vitadel.training import loop
from vitadel.training.objectives.afat import Afat
from vitadel.training.plugins.epsilon_warmup import EpsilonWarmup
from vitadel.training.recipes import training_sections as sections
from vitadel.training.recipes import yaml_files
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose, deciding
from vitadel.training.recipes.probe_sections import LinearHead, PatchHead
from vitadel.training.recipes.yaml_files import translate, translate_settings
from vitadel.training.run import run_harden

CPU = join_processes("cpu")

OLD = """
extends: shapes/pgd-at
optimiser: {rate: 2e-3, rate_batch: 64, clip: 2.0}
schedule: {warm_up: 1, warm_up_rate: 1e-5, final_rate: 1e-4, cool_down: 2}
train: {accumulation: 2, precision: bf16}
augmentation: {flip: 0.25, colour_jitter: 0.1, rand_augment: null, erasing: 0.1, mix_probability: 0.5, repeats: 2}
plugins: {epsilon_warmup: {epochs: 2, first: 1/255}}
"""
NEW = """
extends: shapes/pgd-at
optimizer: {lr: 2e-3, lr_reference_batch: 64, clip_grad_norm: 2.0}
schedule: {warmup_epochs: 1, warmup_lr: 1e-5, min_lr: 1e-4, cooldown_epochs: 2}
train: {grad_accum: 2, amp_dtype: bf16}
augmentation: {hflip: 0.25, color_jitter: 0.1, auto_augment: null, reprob: 0.1, mixup_prob: 0.5, repeated_aug: 2}
plugins: {epsilon_warmup: {epochs: 2, start_eps: 1/255}}
"""


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(yaml_files, "_reported", set())


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_an_old_recipe_means_the_same_as_a_new_one(tmp_path, capsys):
    new = compose(written(tmp_path, NEW, "new.yaml"))
    assert capsys.readouterr().err == ""
    assert compose(written(tmp_path, OLD)) == new
    assert build_recipe(new, "new").optimizer.lr_reference_batch == 64


def test_every_new_name_is_a_field():
    classes = {
        "optimizer": (sections.OptimizerSection,),
        "schedule": (sections.Schedule,),
        "train": (sections.TrainSection,),
        "augmentation": (sections.Augmentation,),
        "head": (LinearHead, PatchHead),
        "objective.afat": (Afat,),
        "plugins.epsilon_warmup": (EpsilonWarmup,),
    }
    for section, keys in yaml_files._KEYS.items():
        known = {field.name for cls in classes[section] for field in fields(cls)}
        assert set(keys.values()) <= known
        assert not set(keys) & known


def test_new_names_are_reported_once_in_one_line(tmp_path, capsys):
    name = written(tmp_path, OLD)
    compose(name)
    (line,) = capsys.readouterr().err.splitlines()
    assert "'optimiser' is now 'optimizer'" in line
    assert "'optimiser.rate' is now 'optimizer.lr'" in line
    assert "'schedule.warm_up' is now 'schedule.warmup_epochs'" in line
    compose(name)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimiser.rate=3e-4", "optimizer", "lr", 3e-4),
        ("optimiser.weight_decay=0.1", "optimizer", "weight_decay", 0.1),
        ("schedule.warm-up=2", "schedule", "warmup_epochs", 2),
        ("train.precision=bf16", "train", "amp_dtype", "bf16"),
    ],
)
def test_overrides(capsys, override, section, key, value):
    assert compose("shapes/pgd-at", None, [override])[section][key] == value
    assert f"'{section}.{key}'" in capsys.readouterr().err
    assert compose("shapes/pgd-at", None, {override.partition("=")[0]: value})[section][key] == value


def test_rows_of_a_table(tmp_path):
    name = written(
        tmp_path,
        "extends: shapes/pgd-at\nsweep:\n  - a: {optimiser.rate: 0.5}\n    b: {optimiser: {rate: 0.25}}\n",
    )
    assert [compose(name, row)["optimizer"]["lr"] for row in "ab"] == [0.5, 0.25]


def test_keys_of_an_objective_are_renamed_for_that_objective_alone(tmp_path):
    name = written(tmp_path, "extends: afat/shapes\nobjective: {use: afat, rate: 0.5, side: 8}\n")
    assert compose(name, "afat")["objective"] | {"lr": 0.5, "patch_size": 8} == compose(name, "afat")["objective"]
    assert compose(name, "afat", ["objective.gradient_length=2"])["objective"]["grad_norm"] == 2
    own = {"objective": {"use": "mine.Objective", "rate": 0.5}}
    assert translate(own, {}, "mine") == own


def test_probe_recipes():
    assert compose("probes/shapes", None, ["head.rates=[0.5]"])["head"]["lrs"] == [0.5]
    assert compose("segmentation/shapes", None, {"head.decay": 0.1})["head"]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ("optimizer: {rate: 1, lr: 2}", "optimizer.rate", "optimizer.lr"),
        ("optimiser: {rate: 1}\noptimizer: {lr: 2}", "optimiser", "optimizer"),
        ("schedule: {min_lr: 0, final_rate: 0}", "schedule.final_rate", "schedule.min_lr"),
    ],
)
def test_both_names_in_one_recipe_are_refused(tmp_path, text, old, new):
    name = written(tmp_path, f"extends: shapes/pgd-at\n{text}\n")
    with pytest.raises(UserError, match="gives both") as caught:
        compose(name)
    assert f"'{old}'" in str(caught.value)
    assert f"'{new}'" in str(caught.value)


def test_both_names_in_overrides_are_refused():
    with pytest.raises(UserError, match=r"both 'optimiser\.rate' and 'optimizer\.lr'"):
        compose("shapes/pgd-at", None, ["optimiser.rate=1", "optimizer.lr=2"])


def test_a_new_name_may_override_an_old_one_of_the_recipe_it_extends(tmp_path):
    written(tmp_path, OLD, "old.yaml")
    name = written(tmp_path, "extends: old.yaml\noptimizer: {lr: 0.125}\n")
    assert compose(name)["optimizer"]["lr"] == 0.125


def old_names(settings: dict[str, object]) -> dict[str, object]:
    """What an earlier version recorded for the same recipe."""
    renamed = {
        f"{'optimiser' if section == 'optimizer' else section}.{old}": f"{section}.{new}"
        for section, keys in yaml_files._KEYS.items()
        for old, new in keys.items()
    }
    back = {new: old for old, new in renamed.items()}
    return {back.get(key, key.replace("optimizer.", "optimiser.")): value for key, value in settings.items()}


def test_recorded_settings_are_translated():
    settings = deciding(document())
    assert old_names(settings) != settings
    assert translate_settings(old_names(settings)) == settings


@pytest.mark.slow
def test_a_run_folder_with_old_names_resumes(tmp_path, monkeypatch):
    """The settings in command.json and the recipe inside the checkpoint, as an earlier version wrote them."""
    whole = run_harden(recipe(), "small", CPU, out=tmp_path / "whole").results
    folder = tmp_path / "old"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", interrupted_after(loop.save_checkpoint))
        with pytest.raises(Interrupted):
            run_harden(recipe(), "small", CPU, out=folder)
    command = json.loads((folder / "command.json").read_text())
    command["settings"] = old_names(command["settings"])
    (folder / "command.json").write_text(json.dumps(command))
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == 2
    state["recipe"] = old_names(state["recipe"])
    torch.save(state, folder / "checkpoint.pt")
    resumed = run_harden(recipe(), "small", CPU, out=folder, resume=True).results
    assert resumed["training"] == whole["training"]


def interrupted_after(function):
    def wrapped(*arguments):
        function(*arguments)
        raise KeyboardInterrupt

    return wrapped
