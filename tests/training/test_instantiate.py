"""From documents to objects: everything is built, and everything that is wrong is reported at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch

from vitadel.attacks import PGD
from vitadel.backbones.timm_models import create_backbone
from vitadel.errors import UserError
from vitadel.heads.probe_recipe import check_probe
from vitadel.training.recipes import build
from vitadel.training.recipes.build import Recipe, build_recipe, check_tracker
from vitadel.training.recipes.check import check_model, check_recipe, meta_model
from vitadel.training.recipes.compose import compose, merge
from vitadel.training.recipes.instantiate import Faulty, component_names
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.training.recipes.yaml_files import recipe_text, shipped_recipes
from vitadel.training.starting_model import starting_model

GOOD: dict[str, Any] = {
    "about": "a toy",
    "model": {"name": "vit_tiny_patch16_224", "kwargs": {"depth": 1, "img_size": 32, "patch_size": 8}},
    "data": {"train": "shapes@train", "test": "shapes@test", "held_out": 10},
    "threat": {"eps": 4 / 255},
    "objective": {"use": "trades", "beta": 3, "attack": "kl-4(step=1/255)"},
    "plugins": {"awp": {"gamma": 0.01}, "epsilon-warmup": {"epochs": 2}},
    "train": {"epochs": 3},
}


def built(**changes: Any) -> Recipe:
    return build_recipe(merge(GOOD, changes), "toy")


def faults(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(Faulty) as caught:
        built(**changes)
    return caught.value.faults


def test_a_recipe_is_built_as_it_says():
    recipe = built(optimizer={"lr": 1, "betas": [0.9, 0.99]}, audit={"attacks": "pgd-2,fgsm-rs(reach=1.5,restarts=2)"})
    assert type(recipe.objective).__name__ == "Trades"
    attack: Any = recipe.objective.attack
    assert (attack.steps, attack.threat.eps, recipe.objective.beta) == (4, 4 / 255, 3.0)  # type: ignore[attr-defined]
    assert [name for name, _ in recipe.plugins] == ["awp", "epsilon_warmup"]
    assert recipe.plugins[0][1].gamma == 0.01  # type: ignore[attr-defined]
    assert recipe.optimizer.betas == (0.9, 0.99)
    assert isinstance(recipe.optimizer.lr, float)
    assert recipe.audit.attacks == ("pgd-2", "fgsm-rs(reach=1.5,restarts=2)")
    assert recipe.document["about"] == "a toy"
    assert recipe.validation.attack == "pgd-10"
    check_model(recipe, "toy")


def test_how_images_come_to_their_size_reaches_the_model():
    section = built(model={"crop_pct": 0.5, "interpolation": "bilinear"}).model
    record = starting_model(section, 10, "shapes").classifier.record
    assert (record.crop_pct, record.interpolation) == (0.5, "bilinear")
    assert compose("probes/paper", "dinov2-b")["model"]["crop_pct"] == 0.875  # 256 pixels, of which 224


def test_the_norm_of_the_threat_reaches_the_attack():
    recipe = built(threat={"norm": "l2", "eps": 0.5}, objective={"use": "adversarial", "attack": "pgd-3"})
    assert isinstance(recipe.objective.attack, PGD)
    assert type(recipe.objective.attack.threat).__name__ == "L2"


def test_all_faults_are_reported_at_once_unknown_then_missing_then_wrong():
    document = {
        "about": 3,
        "modell": {},
        "data": {"train": "shaps@train", "held_out": 10, "limmit": 5},
        "objective": {"use": "trades", "attack": "kl-10", "betta": 1},
        "plugins": {"aw": {}, "epsilon_warmup": {}},
        "optimizer": {"name": "adamww", "lr": "fast"},
        "train": {"epoch": 3, "batch_size": 2.5, "amp_dtype": "fp8"},
        "audit": {"attacks": ["pdg-20"]},
    }
    with pytest.raises(UserError) as caught:
        build_recipe(document, "aas/table5 (row trades)")
    first, *lines = str(caught.value).splitlines()
    wanted = [
        r"it has no 'modell'.*did you mean model",
        r"data: has no 'limmit'; it takes train, .*did you mean limit",
        r"train: has no 'epoch'; it takes epochs, .*did you mean epochs",
        r"objective: has no 'betta'; it takes attack, beta.*did you mean beta",
        r"it needs 'model'",
        r"train: needs 'epochs'",
        r"plugins.epsilon_warmup: needs 'epochs'",
        r"about: should be a text, got 3",
        r"optimizer.lr: should be a valid number, .*got 'fast'",
        r"train.batch_size: should be a valid integer.*got 2.5",
        r"train.amp_dtype: should be 'auto', 'fp32', 'bf16' or 'fp16', got 'fp8'",
        r"plugins: there is no plug-in 'aw'.*did you mean awp",
        r"data.train: unknown data 'shaps@train'.*did you mean shapes",
        r"optimizer.name: timm has no optimizer 'adamww'",
        r"audit.attacks: unknown attack 'pdg-20'",
    ]
    assert first == f"recipe aas/table5 (row trades) has {len(wanted)} problems:"
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.match(rf"  - {pattern}", line), (line, pattern)


def test_a_number_out_of_range_hides_no_name_that_means_nothing():
    reported = faults(
        data={"held_out": -1, "test": "shaps@test"},
        train={"seed": -1, "tracker": "tensorbord"},
        validation={"every": 0, "attack": "pdg-10"},
        audit={"limit": 0, "attacks": ["pdg-20"]},
        augmentation={"hflip": 2, "auto_augment": "strong"},
        optimizer={"clip_grad_norm": 0, "name": "adamww"},
    )
    for name in ("data.test", "train.tracker", "validation.attack", "audit.attacks", "optimizer.name"):
        assert sum(fault.startswith(f"{name}: ") for fault in reported) == 1, (name, reported)
    assert any(fault.startswith("augmentation.auto_augment: ") for fault in reported)
    assert len(reported) == 12  # and one about each number


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [("optimizer", "learning_rate", "lr"), ("optimizer", "wd", "weight_decay"), ("train", "amp", "amp_dtype")],
)
def test_words_of_other_libraries_lead_to_ours(section, key, meant):
    (fault,) = faults(**{section: {key: 1e-3}})
    assert fault.startswith(f"{section}: has no '{key}'")
    assert fault.endswith(f"; did you mean {meant}?")


def test_sections_speak_for_themselves():
    (fault,) = faults(data={"held_out": 0})
    assert fault.startswith("data: there is nothing to select models on")
    assert len(faults(data={"held_out": 0}, augmentation={"hflip": 2})) == 2
    with pytest.raises(Faulty, match="recipe toy has 1 problem:"):
        built(train={"epochs": 0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"name": "vit_tny_patch16_224"}}, r"model.name: unknown model.*did you mean vit_tiny_patch16_224"),
        ({"model": {"name": "zoo:shapes-robst"}}, r"model.name: unknown zoo model.*did you mean zoo:shapes-robust"),
        ({"model": {"mean": [0.5, "x", 0.5]}}, r"model.mean\[1\]: should be a valid number, .*got 'x'"),
        ({"data": {"train": "shaps@train"}}, r"data.train: unknown data 'shaps@train'.*did you mean shapes"),
        ({"data": {"extra": "npz"}}, r"data.extra: 'npz' names no path; write npz:FILE"),
        ({"data": {"test": "cifar10:files"}}, r"data.test: 'cifar10:files': cifar10 takes no path"),
        ({"data": {"train": "cifar10", "test": None}}, r"data.train: 'cifar10' means the test .*write cifar10@train"),
        ({"data": {"test": "shapes@train"}}, r"data.train: 'shapes@train' are the images of data.test.*trained on"),
        ({"augmentation": {"auto_augment": "strong"}}, r"augmentation.auto_augment: timm cannot read 'strong'"),
        ({"threat": {"norm": "l7"}}, r"threat: "),
        ({"objective": {"use": "tradez"}}, r"objective: there is no objective 'tradez'.*did you mean trades"),
        ({"objective": {"use": "terms"}}, r"objective: there is no objective 'terms'"),
        ({"objective": {"use": None}}, r"objective: needs 'use', one of adversarial, afat, mart, mimir, "),
        ({"objective": "trades"}, r"objective: should be keys with values, got 'trades'"),
        ({"objective": {"attack": "kl-10(stepp=1)"}}, r"objective.attack: attack 'kl' has no setting 'stepp'"),
        ({"objective": {"attack": 10}}, r"objective.attack: should be the name of an attack.*got 10"),
        ({"objective": {"attack": "aas+pgd-10"}}, r"objective.attack: .*the plug-in attention_scaling"),
        ({"objective": {"use": "no.such.Thing"}}, r"objective: 'no.such.Thing': importing 'no.such' failed"),
        ({"objective": {"use": "collections.Orderly"}}, r"objective: .*has no class 'Orderly'"),
        ({"plugins": {"collections.OrderedDict": {}}}, r"plugins: 'collections.OrderedDict' is not a dataclass"),
        ({"plugins": {"vitadel.runtime.distributed.Processes": {}}}, r"plugins: 'vitadel.*Processes' is not a plug-in"),
        ({"objective": {"use": "vitadel.runtime.rng.SampleRNG"}}, r"objective: .*no __call__ and no attack; it needs"),
        ({"objective": {"use": "vitadel.attacks.pgd.PGD"}}, r"objective: .*is not an objective: it has no attack; it"),
        ({"plugins": {"weight-average": {}, "weight_average": {}}}, r"plugins.weight_average: is the same .*'weight-"),
        ({"plugins": {"awp": {"gamma": -1}}}, r"plugins.awp: gamma"),
        ({"plugins": {"awp": 0.01}}, r"plugins.awp: should be keys with values, got 0.01"),
        ({"optimizer": {"name": "adamww"}}, r"optimizer.name: timm has no optimizer 'adamww'.*did you mean adamw"),
        ({"optimizer": {"name": "adahessian"}}, r"optimizer.name: 'adahessian' needs second derivatives"),
        ({"plugins": {"overfitting-guard": {"action": "rollback"}, "weight_average": {}}}, r"plugins: .*action: stop"),
        ({"validation": {"attack": "pdg-10"}}, r"validation.attack: unknown attack 'pdg-10'"),
        ({"validation": {"attack": "aas+pgd-10"}}, r"validation.attack: 'aas\+pgd-10' first studies the model"),
        ({"train": {"tracker": "tensorbord"}}, r"train.tracker: there is no tracker.*did you mean tensorboard"),
        ({"plugins": {"epsilon-warmup": {"start_eps": 5 / 255}}}, r"plugins.epsilon_warmup: .*start at 5/255"),
        ({"plugins": {"random_dropping": {}}, "objective": {"attack": "apgd-ce"}}, r"plugins.random_dropping: .*PGD"),
        ({"augmentation": {"mixup": 0.8}, "train": {"batch_size": 10, "grad_accum": 2}},
         r"train.batch_size: mixup and cutmix mix images in pairs.*gives 5"),
        ({"augmentation": {"cutmix": 1.0}, "train": {"batch_size": 3}}, r"train.batch_size: mixup and cutmix.*gives 3"),
        ({"train": {"batch_size": 10, "grad_accum": 3}}, r"train.batch_size: a batch of 10 .* into 3 equal parts"),
        ({"data": {"extra": "npz:x.npz", "extra_share": 0.01}, "train": {"batch_size": 16}},
         r"data.extra_share: .*no image would come from data.extra"),
        ({"data": {"extra": "npz:x.npz", "extra_share": 0.99}, "train": {"batch_size": 16}},
         r"data.extra_share: .*every image would come from data.extra"),
        ({"objective": {"use": "robustness_tokens", "attack": "features-3"}},
         r"adapter: this objective trains tokens .*write `use: tokens`"),
        ({"objective": {"use": "tora", "attack": "pgd-2"}, "adapter": {"use": "tokens"}},
         r"adapter: this objective trains tora .*write `use: tora`"),
        ({"data": {"validation": "shapes@train"}},
         r"data.train: 'shapes@train' holds the images that models are selected on"),
        ({"data": {"train": "shapes(agreement=0.98)@test"}}, r"data.train: .* are the images of data.test"),
        ({"data": {"extra": "shapes@train"}}, r"data.extra: .* the images that models are selected on"),
        ({"plugins": {"epsilon-warmup": {"epochs": 2}}, "objective": {"use": "standard"}},
         r"plugins.epsilon_warmup: this objective has no attack"),
        ({"plugins": {"random_dropping": {}}, "objective": {"use": "standard"}},
         r"plugins.random_dropping: this objective has no attack"),
        ({"schedule": {"shape": "constant", "min_lr": 0.1}}, r"schedule: the shape 'constant' has no min_lr"),
        ({"plugins": {"attention_scaling": {"gap": 4}}, "train": {"epochs": 3}},
         r"plugins.attention_scaling: a gap of 4 epochs is longer than the training of 3"),
        ({"train": {"epochs": True}}, r"train.epochs: should be a valid integer, got True"),
    ],
    ids=str,
)  # fmt: skip
def test_each_fault_is_reported_under_its_name(changes, said):
    found = faults(**changes)
    assert any(re.match(said, fault) for fault in found), found


@pytest.mark.parametrize(
    ("settings", "cooldown"), [({"gap": 3}, 0), ({"gap": 4}, 1), ({"gap": 4, "search": "fixed"}, 0)], ids=str
)
def test_a_gap_that_the_training_reaches_or_that_nothing_waits_for_is_no_fault(settings, cooldown):
    built(plugins={"attention_scaling": settings}, train={"epochs": 3}, schedule={"cooldown_epochs": cooldown})


def test_a_wrong_spec_is_reported_once_and_under_its_own_name():
    (fault,) = faults(data={"validation": "shapes(colour=red)@val"})
    assert re.match(r"data.validation: .*no setting 'colour'", fault)


def test_the_threats_own_fault_does_not_hide_those_of_attacks():
    found = faults(threat={"eps": "lots"}, objective={"attack": "kll-3"})
    assert any(fault.startswith("threat.eps") for fault in found)
    assert any(fault.startswith("objective.attack") for fault in found)


OWN = """
from dataclasses import dataclass
from vitadel.types import Attack

@dataclass(frozen=True)
class Mine:
    attack: Attack | None = None
    weight: float = 1.0
    adapter: str = "none of ours"
    def __call__(self, model, x, z, y):
        return {}

@dataclass
class Telling:
    every: int = 1
    def after_step(self, run):
        run.report("step")
"""


def test_classes_of_the_users_own_by_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "own_defence_parts.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    changes = {
        "objective": {"use": "own_defence_parts.Mine", "attack": "pgd-3", "weight": "1e-1"},
        "plugins": {"own_defence_parts.Telling": {"every": 2}},
    }
    recipe = built(**changes)
    assert isinstance(recipe.objective.attack, PGD)
    assert recipe.objective.weight == 0.1  # type: ignore[attr-defined]
    assert recipe.plugins[-1][1].every == 2  # type: ignore[attr-defined]
    (fault,) = faults(**merge(changes, {"objective": {"wait": 1}}))
    assert fault == "objective: has no 'wait'; it takes attack, weight, adapter; did you mean weight?"


DANGEROUS = """
from dataclasses import dataclass
from pathlib import Path

class Plain:
    def __init__(self, **settings):
        Path("done").touch()
    attack = None
    def __call__(self, model, x, z, y): ...
    def after_step(self, run): ...

@dataclass
class Shapeless:
    setting: int = 1
    def __post_init__(self):
        Path("done").touch()

@dataclass
class Failing:
    thing: Path | None = None
    other: "no type at all" = None
    attack: object = None
    def __post_init__(self):
        raise ZeroDivisionError("not today")
    def __call__(self, model, x, z, y): ...
    def check_objective(self, objective, threat): ...
    def after_step(self, run): ...

@dataclass
class FailingLater:
    function: object = 1
    path: int = 1
    def check_objective(self, objective, threat):
        raise KeyError("what")
    def after_step(self, run): ...

@dataclass
class FailingLast:
    def check_model(self, model):
        raise OSError("no model for me")
    def after_step(self, run): ...

class Odd: ...

@dataclass
class Odder:
    odd: Odd | None = None
    def after_step(self, run): ...
"""


@pytest.fixture
def dangerous(tmp_path, monkeypatch):
    (tmp_path / "dangerous_parts.py").write_text(DANGEROUS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_called_that_is_no_objective_and_no_plugin(dangerous):
    command = {"args": ["touch", "done"]}
    for name, settings in (
        ("subprocess.Popen", command),
        ("dangerous_parts.Plain", {}),
        ("dangerous_parts.Shapeless", {}),
    ):
        (objective,) = faults(objective={"use": name, **settings})
        (plugin,) = faults(plugins={name: settings})
        assert re.search(r"is not (a dataclass|an objective)", objective)
        assert re.search(r"is not a (dataclass|plug-in)", plugin)
    assert not (dangerous / "done").exists()


def test_whatever_the_users_classes_raise_is_a_fault_among_others(dangerous):
    found = faults(
        objective={"use": "dangerous_parts.Failing"}, plugins={"dangerous_parts.Failing": {}, "awp": {"gamma": -1}}
    )
    failed = "it failed with ZeroDivisionError: not today"
    assert found[0] == f"objective: {failed}"
    assert found[1].startswith("plugins.awp: gamma")
    assert found[2] == f"plugins.dangerous_parts.Failing: {failed}"
    (fault,) = faults(plugins={"dangerous_parts.FailingLater": {"function": 2, "path": 3}})
    assert fault == "plugins.dangerous_parts.FailingLater: it failed with KeyError: 'what'"


def test_a_users_check_of_the_model_is_heard(dangerous):
    (fault,) = check_faults(plugins={"dangerous_parts.FailingLast": {}})
    assert fault == "plugins.dangerous_parts.FailingLast: it failed with OSError: no model for me"


def test_settings_of_types_that_no_one_knows_are_handed_on(dangerous):
    recipe = built(plugins={"dangerous_parts.Odder": {"odd": {"a": 1}}})
    assert recipe.plugins[-1][1].odd == {"a": 1}  # type: ignore[attr-defined]


def test_a_module_that_ends_the_program_is_a_fault(tmp_path, monkeypatch):
    (tmp_path / "ending_script.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    (fault,) = faults(objective={"use": "ending_script.Thing"})
    assert "importing 'ending_script' failed: SystemExit: 3" in fault


def test_trackers(monkeypatch):
    for good in ("none", "all", "tensorboard"):
        check_tracker(good)
    monkeypatch.setattr(build, "get_available_trackers", list)
    with pytest.raises(UserError, match="'wandb' is not installed; install it, or take one of none"):
        check_tracker("wandb")
    check_tracker("none")


NAN, INF = float("nan"), float("inf")
OUTSIDE = {
    "model": {"drop_path": [-0.1, 1.0, NAN], "input_size": [0], "small_images": [0]},
    "data": {"workers": [-1], "easier_epochs": [-1], "extra_share": [0, 1, NAN], "held_out": [-1], "limit": [0]},
    "augmentation": {
        "mixup": [-1, INF, NAN], "cutmix": [-1, INF], "color_jitter": [-0.1, NAN], "padding": [-1], "rotation": [-1],
        "scale": [[0, 1], [-1, 1], [0.5, INF], [0.5, 0.4]], "ratio": [[0, 1], [1, NAN], [2, 1]], "hflip": [1.1, NAN],
        "reprob": [-0.1], "mixup_prob": [2], "mixup_switch_prob": [-1], "repeated_aug": [0],
    },
    "threat": {"eps": [NAN, INF, -0.1, 2]},
    "optimizer": {
        "lr": [0, -1, INF, NAN], "lr_reference_batch": [0, -1], "weight_decay": [-0.1, INF],
        "clip_grad_norm": [0, -1, INF, NAN],
        "betas": [[0.9, 1], [-0.1, 0.9], [NAN, 0.9]], "eps": [0, -1, INF], "momentum": [-0.1, 1, NAN],
    },
    "schedule": {
        "warmup_epochs": [-1, INF], "warmup_lr": [-1, NAN], "min_lr": [-1], "cooldown_epochs": [-1],
        "pct_start": [0, 1, NAN],
        "milestones": [[0, 1], [3, 2], [2, 2], [NAN], [5]], "decay_rate": [0, INF],
    },
    "train": {
        "epochs": [0], "batch_size": [0], "grad_accum": [0], "checkpoint_every": [0], "seed": [-1, 2**62 + 1],
    },
    "validation": {"every": [0], "limit": [0, -5]},
    "audit": {"limit": [0], "batch_size": [0]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [(section, key, value) for section, keys in OUTSIDE.items() for key, values in keys.items() for value in values],
)
def test_numbers_outside_of_their_range_are_reported(section, key, value):
    shape = {"shape": "steps"} if key == "milestones" and value != [5] else {}
    found = [fault for fault in faults(**{section: {key: value, **shape}}) if fault.startswith(f"{section}: ")]
    assert len(found) == 1
    assert key in found[0]


def test_numbers_at_the_edge_of_their_range_are_good():
    recipe = built(
        model={"drop_path": 0.99},
        augmentation={"scale": [1, 1], "padding": 0},
        optimizer={"betas": [0, 0.999], "momentum": 0, "weight_decay": 0, "clip_grad_norm": 1e-9},
        schedule={"shape": "steps", "milestones": [1, 2.5]},
        train={"seed": 2**62, "batch_size": 1},
        validation={"every": 1, "limit": None},
        audit={"limit": None},
    )
    assert recipe.train.seed == 2**62


def test_all_numbers_of_a_section_are_reported_together():
    (fault,) = faults(optimizer={"lr": 0, "clip_grad_norm": -1.5, "betas": [0.9, 1.0]})
    assert fault == (
        "optimizer: lr must be a finite number above 0, got 0.0; "
        "betas must be at least 0 and below 1, got [0.9, 1.0]; clip_grad_norm must be a finite number above 0, got -1.5"
    )


def test_a_cycle_takes_no_warm_up():
    (fault,) = faults(schedule={"shape": "cyclic", "warmup_epochs": 2})
    assert fault.startswith("schedule: 'cyclic' has its own rise and would ignore warmup_epochs, got 2")
    built(schedule={"shape": "cyclic", "warmup_epochs": 0})


def test_mixing_of_pairs_is_good():
    mixed = built(augmentation={"mixup": 0.8}, train={"batch_size": 12, "grad_accum": 3})
    assert (mixed.augmentation.mixup, mixed.train.batch_size) == (0.8, 12)
    assert built(train={"batch_size": 15, "grad_accum": 3}).train.batch_size == 15  # odd, but nothing is mixed
    assert built(data={"extra": "npz:x.npz", "extra_share": 0.04}, train={"batch_size": 16}).data.extra_share == 0.04


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"validation": "shapes(size=16)@test", "test": "shapes(size=16)"}, "data.validation: .*selected on them"),
        ({"extra": "shapes(size=16)@test", "test": "shapes(size=16)"}, "data.extra: .*trained on them"),
        ({"easier": "shapes ( size = 16.0 ) @test", "easier_epochs": 1, "test": "shapes(size=16)"}, "data.easier: "),
        ({"validation": "shapes(texture=8/255,size=32)", "test": "shapes(size=32,texture=8/255)@test"}, "data.valid"),
        ({"validation": "shapes(size=32)", "test": "shapes@test"}, "data.validation: "),
        ({"validation": "CIFAR10", "test": "cifar10@test"}, "data.validation: "),
        ({"validation": "dtd@validation", "test": "dtd@val"}, "data.validation: "),
        ({"extra": "npz:./a/../x.npz", "test": "npz:x.npz@test"}, "data.extra: "),
        ({"validation": "imagenet:dir@val", "test": "imagenet:dir"}, "data.validation: "),
        ({"extra": "parquet:x.parquet(label=fine)", "test": "parquet:x.parquet"}, "data.extra: "),
        ({"train": "folder:dir", "test": "folder:dir@test"}, "data.train: "),
        ({"train": "shapes(colour=red)@train"}, "data.train: shapes has no setting 'colour'"),
        ({"validation": "shapes(size=16)@test", "test": "shapes(size=24)"}, r"data.validation: .* images of data.test"),
    ],
    ids=str,
)
def test_test_images_are_for_testing_however_they_are_written(data, said):
    found = faults(data=data)
    assert len(found) == 1
    assert re.match(said, found[0]), found


@pytest.mark.parametrize(
    "data",
    [
        {"validation": "shapes(seed=1)@test", "test": "shapes@test"},
        {"validation": "flowers102@val", "train": "flowers102@train", "test": "flowers102"},
        {"extra": "npz:x.npz", "test": "npz:y.npz"},
        {"extra": "npz:x.npz(images=x_train,labels=y_train)", "test": "npz:x.npz(images=x_test,labels=y_test)"},
        {"extra": "svhn@extra", "train": "svhn@train", "test": "svhn"},
        {"train": "imagenet:dir@train", "test": "imagenet:dir"},
    ],
    ids=str,
)
def test_other_images_are_not_test_images(data):
    section = built(data=data).data
    assert {name: getattr(section, name) for name in data} == data


def test_folders_are_the_same_if_their_images_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / "set" / split / "cat").mkdir(parents=True)
    (tmp_path / "link").symlink_to("set")
    apart = {"train": "folder:set@train", "test": "folder:set@val"}
    built(data=apart)
    for validation in ("folder:set", "folder:set/val", "folder:./set@validation", "folder:link@val"):
        (fault,) = faults(data={**apart, "validation": validation})
        assert fault.startswith("data.validation: ")
    (tmp_path / "set" / "test" / "cat").mkdir(parents=True)
    built(data={**apart, "validation": "folder:set"})  # which now means another split


def test_names_are_found_by_walking():
    assert {"adversarial", "mart", "standard", "trades"} <= set(component_names("objective"))
    assert "terms" not in component_names("objective")
    assert {"awp", "epsilon_warmup", "weight_average"} <= set(component_names("plug-in"))


def check_faults(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(Faulty) as caught:
        check_model(built(**changes), "toy")
    return caught.value.faults


def test_models_that_cannot_be_built_are_reported():
    (fault,) = check_faults(model={"kwargs": {"depht": 3}})
    assert fault.startswith("model: 'vit_tiny_patch16_224' cannot be built")
    (fault,) = check_faults(model={"mean": [0.5, 0.5, 0.5]})
    assert "mean and std together" in fault
    (fault,) = check_faults(model={"small_images": 3, "input_size": 32})
    assert "cannot be cut" in fault


@pytest.mark.parametrize(
    "kwargs",
    [{"num_heads": 0}, {"depth": -1}, {"embed_dim": 7}, {"patch_size": 0}, {"img_size": "2020-01-01"}, {"depth": 2.5}],
    ids=str,
)
def test_arguments_that_make_no_sense_to_timm_are_reported(kwargs):
    (fault,) = check_faults(model={"kwargs": kwargs})
    assert fault.startswith("model: 'vit_tiny_patch16_224' cannot be ")
    assert "\n" not in fault


@pytest.mark.parametrize("kwargs", [{"num_heads": 0}, {"depth": -1}])
def test_such_arguments_are_user_errors_when_the_model_is_made_too(kwargs):
    with pytest.raises(UserError, match="cannot be built with"):
        create_backbone("vit_tiny_patch16_224", 10, kwargs)


def test_plugins_that_do_not_go_with_the_model_are_reported_together():
    document = GOOD | {
        "model": {"name": "resnet18"},
        "plugins": {"attention_scaling": {"gap": 1}, "random_dropping": {}},
    }
    with pytest.raises(Faulty) as caught:
        check_model(build_recipe(document, "toy"), "toy")
    scaling, dropping = caught.value.faults
    assert scaling.startswith("plugins.attention_scaling: no anatomy known")
    assert dropping.startswith("plugins.random_dropping: no anatomy known")


@pytest.mark.parametrize(
    ("name", "placement", "reported"),
    [("resnet18", "prefix", "no anatomy known"), ("eva02_tiny_patch14_224", "append", "RoPE")],
)
def test_an_adapter_that_does_not_go_with_the_model_is_reported(name, placement, reported):
    document = GOOD | {"model": {"name": name}, "adapter": {"use": "tokens", "placement": placement}}
    with pytest.raises(Faulty) as caught:
        check_model(build_recipe(document, "toy"), "toy")
    (fault,) = caught.value.faults
    assert fault.startswith("adapter: ")
    assert reported in fault


def test_numbers_of_classes_must_agree():
    (fault,) = check_faults(data={"train": "cifar10@train", "test": "cifar100@test"})
    assert fault == "data: the numbers of classes do not agree: train 10, test 100"
    (fault,) = check_faults(model={"num_classes": 7})
    assert fault == "data: the numbers of classes do not agree: train 10, test 10, model.num_classes 7"
    (fault,) = check_faults(model={"head_classes": [0, 1, 2]})
    assert fault == "data: the numbers of classes do not agree: train 10, test 10, model.head_classes 3"


def test_a_zoo_model_with_another_head_is_good():
    assert meta_model(ModelSection("zoo:shapes-standard", num_classes=100)).record.num_classes == 100


TABLE = """
extends: shapes/pgd-at
sweep:
  - a: {}
    b: {train.epoch: 3}
    c: {train.epoch: 3, threat.eps: lots}
"""


def test_faults_of_a_table_name_their_rows(tmp_path):
    file = tmp_path / "table.yaml"
    file.write_text(TABLE)
    reported = check_recipe(str(file), check_probe)
    assert reported is not None
    first, *lines = reported.splitlines()
    assert first == f"recipe {file} has 2 problems:"
    assert lines[0].startswith("  - train: has no 'epoch'")
    assert lines[0].endswith("(rows b, c)")
    assert lines[1].startswith("  - threat.eps: ")
    assert lines[1].endswith("(row c)")
    file.write_text(TABLE.replace("a: {}", "a: {train.epoch: 3}"))
    assert check_recipe(str(file), check_probe).splitlines()[1].endswith("did you mean epochs?")  # type: ignore[union-attr]


def test_a_recipe_that_cannot_be_read_is_one_fault(tmp_path):
    assert "no recipe file" in str(check_recipe(str(tmp_path / "missing.yaml"), check_probe))


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_recipes())
def test_every_row_of_every_shipped_recipe_is_good(name):
    assert check_recipe(name, check_probe) is None


def test_a_composed_recipe_is_a_recipe(tmp_path):
    document = compose("aas/table5", "cifar100-xcit+aas")
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_text(document))
    assert compose(file) == document
    assert build_recipe(compose(file), "again") == build_recipe(document, "first")


@pytest.mark.parametrize(("row", "parameters"), [("s12-4", 26.25), ("m12-4", 46.40), ("l12-8", 103.79)])
def test_sizes_that_timm_lacks_have_the_published_parameters(row, parameters):
    section = build_recipe(compose("light/imagenet", row), row).model
    with torch.device("meta"):
        model = timm.create_model(section.name, **section.kwargs)
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(parameters, abs=0.005)
