"""From documents to objects: everything is built, and everything that is wrong is told at once."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch

from vitadel.attacks import PGD
from vitadel.defenses.building import Faulty, Recipe, build_check, build_recipe, check_recipe
from vitadel.defenses.checking import model_fault
from vitadel.defenses.components import component_names
from vitadel.defenses.recipes import compose, merge, recipe_text, shipped_recipes
from vitadel.errors import Mistake

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
    recipe = built(
        optimiser={"rate": 1, "betas": [0.9, 0.99]}, audit={"attacks": "pgd-2,fgsm-rs(reach=1.5,restarts=2)"}
    )
    assert type(recipe.objective).__name__ == "Trades"
    attack: Any = recipe.objective.attack
    assert (attack.steps, attack.threat.eps, recipe.objective.beta) == (4, 4 / 255, 3.0)  # type: ignore[attr-defined]
    assert [name for name, _ in recipe.plugins] == ["awp", "epsilon_warmup"]
    assert recipe.plugins[0][1].gamma == 0.01  # type: ignore[attr-defined]
    assert recipe.optimiser.betas == (0.9, 0.99)
    assert isinstance(recipe.optimiser.rate, float)
    assert recipe.audit.attacks == ("pgd-2", "fgsm-rs(reach=1.5,restarts=2)")
    assert recipe.about == {"about": "a toy"}
    assert recipe.validation.attack == "pgd-10"
    build_check(recipe, "toy")


def test_the_norm_of_the_threat_reaches_the_attack():
    recipe = built(threat={"norm": "l2", "eps": 0.5}, objective={"use": "adversarial", "attack": "pgd-3"})
    assert isinstance(recipe.objective.attack, PGD)
    assert type(recipe.objective.attack.threat).__name__ == "L2"


def test_all_faults_are_told_at_once_unknown_then_missing_then_wrong():
    document = {
        "about": 3,
        "modell": {},
        "data": {"train": "shaps@train", "held_out": 10, "limmit": 5},
        "objective": {"use": "trades", "attack": "kl-10", "betta": 1},
        "plugins": {"aw": {}, "epsilon_warmup": {}},
        "optimiser": {"name": "adamww", "rate": "fast"},
        "train": {"epoch": 3, "batch_size": 2.5, "precision": "fp8"},
        "audit": {"attacks": ["pdg-20"]},
    }
    with pytest.raises(Mistake) as caught:
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
        r"optimiser.rate: should be a valid number, .*got 'fast'",
        r"train.batch_size: should be a valid integer.*got 2.5",
        r"train.precision: should be 'fp32', 'bf16' or 'fp16', got 'fp8'",
        r"plugins: there is no plug-in 'aw'.*did you mean awp",
        r"audit.attacks: unknown attack 'pdg-20'",
    ]
    assert first == f"recipe aas/table5 (row trades) has {len(wanted)} problems:"
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.match(rf"  - {pattern}", line), (line, pattern)


def test_sections_speak_for_themselves():
    (fault,) = faults(data={"held_out": 0})
    assert fault.startswith("data: there is nothing to select models on")
    assert len(faults(data={"held_out": 0}, augmentation={"flip": 2})) == 2
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
        ({"data": {"test": "shapes@train"}}, r"data.test: 'shapes@train' is what the model is trained on"),
        ({"augmentation": {"rand_augment": "strong"}}, r"augmentation.rand_augment: timm cannot read 'strong'"),
        ({"threat": {"norm": "l7"}}, r"threat: "),
        ({"objective": {"use": "tradez"}}, r"objective: there is no objective 'tradez'.*did you mean trades"),
        ({"objective": {"use": "terms"}}, r"objective: there is no objective 'terms'"),
        ({"objective": {"use": None}}, r"objective: needs 'use', one of adversarial, mart, standard, trades"),
        ({"objective": "trades"}, r"objective: should be keys with values, got 'trades'"),
        ({"objective": {"attack": "kl-10(stepp=1)"}}, r"objective.attack: attack 'kl' has no setting 'stepp'"),
        ({"objective": {"attack": 10}}, r"objective.attack: should be the name of an attack.*got 10"),
        ({"objective": {"attack": "aas+pgd-10"}}, r"objective.attack: .*the plug-in attention_scaling"),
        ({"objective": {"use": "no.such.Thing"}}, r"objective: 'no.such.Thing': importing 'no.such' failed"),
        ({"objective": {"use": "collections.Orderly"}}, r"objective: .*has no class 'Orderly'"),
        ({"plugins": {"collections.OrderedDict": {}}}, r"plugins.collections.OrderedDict: .*does not tell"),
        ({"plugins": {"fractions.Fraction": {}}}, r"plugins.fractions.Fraction: is not a plug-in"),
        ({"plugins": {"awp": {"gamma": -1}}}, r"plugins.awp: gamma"),
        ({"plugins": {"awp": 0.01}}, r"plugins.awp: should be keys with values, got 0.01"),
        ({"optimiser": {"name": "adamww"}}, r"optimiser.name: timm has no optimiser 'adamww'.*did you mean adamw"),
        ({"validation": {"attack": "pdg-10"}}, r"validation.attack: unknown attack 'pdg-10'"),
        ({"train": {"epochs": True}}, r"train.epochs: should be a valid integer, got True"),
    ],
    ids=str,
)  # fmt: skip
def test_each_fault_is_told_under_its_name(changes, said):
    found = faults(**changes)
    assert any(re.match(said, fault) for fault in found), found


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
    def __call__(self, model, x, z, y):
        return {}

@dataclass
class Telling:
    every: int = 1
    def after_step(self, run):
        run.tell("step")
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
    assert fault == "objective: has no 'wait'; it takes attack, weight; did you mean weight?"


def test_names_are_found_by_walking():
    assert {"adversarial", "mart", "standard", "trades"} <= set(component_names("objectives"))
    assert "terms" not in component_names("objectives")
    assert {"awp", "epsilon_warmup", "weight_average"} <= set(component_names("plugins"))


def check_faults(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(Faulty) as caught:
        build_check(built(**changes), "toy")
    return caught.value.faults


def test_models_that_cannot_be_built_are_told():
    (fault,) = check_faults(model={"kwargs": {"depht": 3}})
    assert fault.startswith("model: 'vit_tiny_patch16_224' cannot be built")
    (fault,) = check_faults(model={"mean": [0.5, 0.5, 0.5]})
    assert "mean and std together" in fault
    (fault,) = check_faults(model={"small_images": 3, "input_size": 32})
    assert "cannot be cut" in fault


def test_numbers_of_classes_must_agree():
    (fault,) = check_faults(data={"train": "cifar10@train", "test": "cifar100@test"})
    assert fault == "data: the numbers of classes do not agree: train 10, test 100"
    (fault,) = check_faults(model={"num_classes": 7})
    assert fault == "data: the numbers of classes do not agree: train 10, test 10, model.num_classes 7"


def test_a_zoo_model_with_another_head_is_good():
    assert model_fault('{"name": "zoo:shapes-standard", "num_classes": 100}') is None


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
    told = check_recipe(str(file))
    assert told is not None
    first, *lines = told.splitlines()
    assert first == f"recipe {file} has 2 problems:"
    assert lines[0].startswith("  - train: has no 'epoch'")
    assert lines[0].endswith("(rows b, c)")
    assert lines[1].startswith("  - threat.eps: ")
    assert lines[1].endswith("(row c)")
    file.write_text(TABLE.replace("a: {}", "a: {train.epoch: 3}"))
    assert check_recipe(str(file)).splitlines()[1].endswith("did you mean epochs?")  # type: ignore[union-attr]


def test_a_recipe_that_cannot_be_read_is_one_fault(tmp_path):
    assert "no recipe file" in str(check_recipe(str(tmp_path / "missing.yaml")))


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_row_of_every_shipped_recipe_is_good(name):
    assert check_recipe(name) is None


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
