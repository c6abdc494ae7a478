"""Settings of a recipe that contradict the weights it starts from."""

from __future__ import annotations

import pytest

import vitadel
from command_line import vitadel as command
from vitadel.backbones.checkpoints import save_classifier
from vitadel.training.recipes.training_sections import ModelSection
from vitadel.training.starting_model import contradictions

HALF, IMAGENET = (0.5,) * 3, (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
DEIT, VIT = "deit_tiny_patch16_224", "vit_tiny_patch16_224"


@pytest.mark.parametrize(
    ("section", "keys"),
    [
        (ModelSection(DEIT, "w.pt", mean=HALF, std=HALF), ["mean", "std"]),
        (ModelSection(DEIT, "w.pt", mean=IMAGENET, std=STD), []),
        (ModelSection(VIT, "pretrained", mean=HALF, std=HALF), []),
        (ModelSection(VIT, "pretrained", mean=IMAGENET), ["mean"]),
        (ModelSection(DEIT, "w.pt", input_size=64), ["input_size"]),
        (ModelSection(DEIT, "w.pt"), []),
        (ModelSection(DEIT, None, mean=HALF, std=HALF), []),  # random weights
        (ModelSection("zoo:shapes-robust", mean=IMAGENET), []),
    ],
)
def test_timm_knows_what_its_models_take(section, keys):
    found = contradictions(section)
    assert [each.partition(" ")[0] for each in found] == [f"model.{key}" for key in keys]
    assert all("timm's" in each and "=null" in each for each in found)


def test_the_record_in_the_weights_comes_before_timm(tmp_path):
    model = vitadel.load_model(
        DEIT, weights="random", num_classes=3, mean=HALF, std=HALF, kwargs={"depth": 1, "embed_dim": 24, "num_heads": 3}
    )
    file = tmp_path / "w.safetensors"
    save_classifier(model, file)
    assert contradictions(ModelSection(DEIT, str(file), mean=HALF, std=HALF)) == []
    (found,) = contradictions(ModelSection(DEIT, str(file), mean=IMAGENET))
    assert "the record in" in found


@pytest.mark.slow
def test_a_check_warns_of_what_was_inherited(tmp_path):
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text(
        "about: x\nmodel: {name: deit_tiny_patch16_224, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}\n"
        "data: {train: shapes@train, held_out: 50}\nthreat: {eps: 4/255}\n"
        "objective: {use: adversarial, attack: pgd-2}\n"
        "optimizer: {name: adamw, lr: 1e-3}\ntrain: {epochs: 1, batch_size: 8}\n"
    )
    mine.write_text("extends: ./base.yaml\nabout: y\nmodel: {weights: w.safetensors}\n")
    checked = command("recipes", "check", str(mine))
    assert checked.stderr.count("warning: model.") == 2
    assert "model.mean is [0.5, 0.5, 0.5], but timm's deit_tiny_patch16_224 has [0.485, 0.456, 0.406]" in checked.stderr
    assert "warning" not in command("recipes", "check", str(base)).stderr
