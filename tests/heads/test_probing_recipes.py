"""Recipes for heads: built as they say, or every fault at once; each verb knows the other's recipes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from small_probes import LINEAR, MASKS, linear, masks
from vitadel.errors import UserError
from vitadel.heads.probe_recipe import build_probe, check_probe, pixel_attack, with_tokens
from vitadel.heads.segmentation import OnPixels
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.check import check_recipe
from vitadel.training.recipes.compose import compose, rows
from vitadel.training.recipes.instantiate import Faulty
from vitadel.training.recipes.probe_sections import LEARNING_RATES, LinearHead, MaskData, PatchHead
from vitadel.training.recipes.yaml_files import recipe_text


def faults(document: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(Faulty) as caught:
        build_probe(document, "toy")
    return caught.value.faults


def test_a_recipe_is_built_as_it_says():
    recipe = build_probe(linear(audit={"attacks": "fgsm,pgd-4(restarts=2)"}), "toy")
    assert recipe.head == LinearHead(blocks=(1, 2), average=(False, True), lrs=(0.01, 0.1))
    assert (recipe.tokens, recipe.audit.attacks) == (None, ("fgsm", "pgd-4(restarts=2)"))
    recipe = build_probe(with_tokens(masks(), "secret.safetensors"), "toy")
    assert (recipe.head, recipe.tokens) == (PatchHead(lrs=(1e-3, 1e-1)), "secret.safetensors")
    assert isinstance(recipe.data, MaskData)


def test_all_faults_are_reported_at_once():
    reported = faults(
        {
            **linear(),
            "plugins": {},
            "model": {},
            "head": {"use": "linear", "blocks": [], "ratez": [1]},
            "data": {"train": "shapes", "test": "shapes", "held_out": 0},
            "audit": {"attacks": ["pgdd-3"]},
        }
    )
    text = "\n".join(reported)
    for part in ("no 'plugins'", "model: needs 'name'", "has no 'ratez'", "held_out must be", "did you mean pgd"):
        assert part in text, part


@pytest.mark.parametrize(
    ("document", "reported"),
    [
        (linear(data={"train": "shapes(size=16)"}), "means the test images; write shapes(size=16)@train"),
        (linear(data={"train": "shapes(size=16)@test"}), "are the images of data.test"),
        (linear(data={"train": "parquet:a.parquet", "test": "parquet:a.parquet"}), "are the images of data.test"),
        (linear(data={"train": "npz:a.npz(images=images)", "test": "npz:a.npz"}), "are the images of data.test"),
        (
            linear(data={"train": "imagenet:a@val", "test": "imagenet:a(list=some.txt)@val"}),
            "are the images of data.test",
        ),
        (linear(head={"blocks": [1, 1]}), "none twice"),
        (linear(head={"lrs": [-1]}), "lrs must be"),
        (linear(data={"classes": 3}), "data: has no 'classes'"),
        (linear(audit={"eps": 8}), "Did you mean 8/255"),
        ({**linear(), "head": {"use": "tree"}}, "one of linear, segmentation, got 'tree'"),
        ({**linear(), "head": {"blocks": [1]}}, "one of linear, segmentation"),
        ({**linear(), "tokens": 3}, "tokens: should be a text"),
        (masks(data={"train": "cifar10@train"}), "'cifar10@train' has no masks"),
        (masks(data={"train": "folder:a@train"}), "needs 'classes'"),
        (masks(data={"train": "parquet:a(mask=m)", "test": "parquet:a", "classes": 3}), "are the images of data.test"),
        (masks(data={"void": [300]}), "void must be from 0 to 255"),
        (masks(audit={"attacks": ["square"]}), "'square' does not attack masks; use fgsm, pgd-K"),
        (masks(audit={"attacks": ["cw-5"]}), "does not attack masks"),
        (masks(audit={"attacks": ["pgd-5(restarts=2)"]}), "does not attack masks"),
        (masks(head={"blocks": [1]}), "head: has no 'blocks'"),
    ],
)
def test_what_is_wrong_is_reported(document, reported):
    text = "\n".join(faults(document))
    assert reported in text


def test_an_attack_on_masks_is_pgd_with_the_settings_of_its_name():
    audit = build_probe(masks(), "toy").audit
    attack = pixel_attack("pgd-7(step=1/255)", audit)
    assert (attack.steps, attack.stepper.length, attack.threat.eps) == (7, 1 / 255, 8 / 255)
    assert (attack.goal, attack.stop_when_fooled, attack.random_start) == (OnPixels(), False, True)
    assert (pixel_attack("fgsm", audit).steps, pixel_attack("fgsm", audit).random_start) == (1, False)


def test_each_verb_reports_the_other():
    with pytest.raises(UserError, match="run it with `vitadel probe`"):
        build_recipe(compose("probes/shapes"), "probes/shapes")
    with pytest.raises(UserError, match="run it with `vitadel harden`"):
        build_probe(compose("shapes/trades"), "shapes/trades")


def test_the_model_must_have_the_tokens_that_the_head_takes():
    check_probe(linear(), "toy")
    with pytest.raises(Faulty, match="last 3 blocks were asked for; the model has 2"):
        check_probe(linear(head={"blocks": [3]}), "toy")
    swin = linear(model={"name": "swin_tiny_patch4_window7_224", "kwargs": {}})
    swin["model"]["kwargs"] = {}
    with pytest.raises(Faulty, match="no class and patch tokens"):
        check_probe(swin, "toy")


def test_check_knows_both_kinds(tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump(MASKS))
    bad.write_text(yaml.safe_dump({**LINEAR, "train": {"step": 3}}))
    assert check_recipe(str(good), check_probe) is None
    assert "did you mean steps" in str(check_recipe(str(bad), check_probe))


def test_overrides_know_the_sections_of_a_head():
    document = compose("probes/shapes", None, ["head.lrs=[1e-3, 1/10]", "data.limit=null", "tokens=my.safetensors"])
    assert (document["head"]["lrs"], document["data"]["limit"], document["tokens"]) == (
        [1e-3, 0.1],
        None,
        "my.safetensors",
    )
    assert list(document) == [
        "about",
        "paper",
        "expected",
        "hardware",
        "model",
        "tokens",
        "data",
        "head",
        "train",
        "audit",
    ]
    wrong = compose("probes/shapes", None, ["head.rate=1", "steps=1"])
    with pytest.raises(UserError, match=r"(?s)did you mean train\.steps.*head: has no 'rate'; it takes blocks"):
        build_probe(wrong, "mine")
    with pytest.raises(UserError, match="it has no 'plugins'"):
        build_probe(compose("segmentation/shapes", None, ["plugins.awp.gamma=1"]), "mine")
    assert compose("segmentation/shapes", None, ["data.size=[32, 32]"])["data"]["size"] == [32, 32]


def test_a_composed_recipe_is_a_recipe(tmp_path):
    document, file = compose("segmentation/paper", "dinov2-g-reg"), tmp_path / "recipe.yaml"
    file.write_text(recipe_text(document))
    assert build_probe(compose(file), "again") == build_probe(document, "first")


def test_the_papers_recipes_are_its_settings():
    linear_heads, patches = (
        build_probe(compose(name, "dinov2-b"), name) for name in ("probes/paper", "segmentation/paper")
    )
    head = linear_heads.head
    assert isinstance(head, LinearHead)
    assert (head.blocks, head.average, head.lrs) == ((1, 4), (False, True), LEARNING_RATES)
    assert (linear_heads.train.steps, linear_heads.train.batch_size) == (12_500, 128)
    assert (patches.head, patches.train.steps, patches.train.batch_size) == (PatchHead(), 40_000, 16)
    assert linear_heads.data.augment  # random crops and flips
    assert (patches.data.augment, patches.data.stride, patches.data.classes) == (True, 341, 150)
    assert (patches.audit.attacks, patches.audit.eps) == (("pgd-30(paper=true)",), 8 / 255)
    assert rows("probes/paper") == rows("segmentation/paper")
    assert len(rows("probes/paper")) == 8
