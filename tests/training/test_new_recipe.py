"""`vitadel recipes new`: what it takes from model and data, and that the result is checked and trained."""

from __future__ import annotations

import json

import pytest
import yaml
from PIL import Image

from command_line import vitadel
from vitadel.errors import UserError
from vitadel.heads.probe_recipe import check_probe
from vitadel.training.recipes.check import check_recipe
from vitadel.training.recipes.new_recipe import OBJECTIVES, new_recipe

VIT = "vit_tiny_patch16_224"


def write_photos(folder, splits, count=12):
    for split in splits:
        for number, name in enumerate(("cat", "dog")):
            place = folder / split / name
            place.mkdir(parents=True)
            for image in range(count):
                Image.new("RGB", (40, 32), (120 * number, 5 * image, 90)).save(place / f"{image}.png")
    return f"folder:{folder}"


def made(spec, **more):
    found = new_recipe(VIT, spec, **{"weights": None, "objective": "trades", **more})
    return yaml.safe_load(found.text), " ".join(found.notes)


def test_head_split_and_normalization_come_from_model_and_data(tmp_path):
    spec = write_photos(tmp_path / "photos", ("train", "val", "test"))
    recipe, notes = made(spec, eps="2/255")
    data = {name: recipe["data"][name] for name in ("train", "validation", "test", "held_out")}
    assert data == {"train": f"{spec}@train", "validation": f"{spec}@val", "test": f"{spec}@test", "held_out": 0}
    assert recipe["model"]["mean"] == [0.5] * 3  # of this model in timm; DeiT has ImageNet's
    assert recipe["model"]["input_size"] == 224
    assert recipe["threat"]["eps"] == "2/255"
    assert recipe["objective"]["attack"] == "kl-3(step=1.5/255)"
    assert "random weights" in notes
    assert "enlarged to 224 px" in notes


def test_without_splits_some_images_are_held_out_and_there_is_no_audit(tmp_path):
    spec = write_photos(tmp_path / "photos", ("",), count=30)
    recipe, notes = made(spec)
    assert (recipe["data"]["train"], recipe["data"]["test"], recipe["data"]["held_out"]) == (spec, None, 6)
    assert recipe["train"]["batch_size"] * 8 <= 54
    assert "no test split" in notes


def test_too_little_data_and_unknown_objectives_are_refused(tmp_path):
    spec = write_photos(tmp_path / "photos", ("",), count=2)
    with pytest.raises(UserError, match="4 images of 2 classes, too few to train on"):
        made(spec)
    with pytest.raises(UserError, match="unknown objective for a new recipe 'trade'; did you mean trades"):
        made(spec, objective="trade")
    with pytest.raises(UserError, match="eps"):
        made(spec, eps="much")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_passes_the_check(tmp_path, objective):
    spec = write_photos(tmp_path / "photos", ("train", "test"))
    path = tmp_path / "mine.yaml"
    path.write_text(new_recipe(VIT, spec, weights=None, objective=objective).text)
    assert check_recipe(str(path), check_probe) is None


@pytest.mark.slow
def test_the_recipe_trains(tmp_path):
    words = ["--model=zoo:shapes-robust", "--data=shapes", "--objective=trades", "--eps=8/255"]
    made = vitadel("recipes", "new", "mine.yaml", *words, cwd=tmp_path)
    assert made.stdout == "mine.yaml\n"
    assert made.stderr.endswith("next: vitadel harden mine.yaml\n")
    assert "already exists" in vitadel("recipes", "new", "mine.yaml", *words, cwd=tmp_path, code=2).stderr
    assert "mine.yaml: good" in vitadel("recipes", "check", "mine.yaml", cwd=tmp_path).stdout
    small = ["data.limit=16", "train.epochs=1", "train.batch_size=8", "validation.limit=4", "audit.limit=4"]
    done = vitadel("harden", "mine.yaml", *small, "audit.attacks=[fgsm]", "--out=run", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["complete"]


def test_a_wrong_ending_is_refused(tmp_path):
    said = vitadel("recipes", "new", "mine.txt", f"--model={VIT}", "--data=shapes", cwd=tmp_path, code=2)
    assert "does not end in .yaml" in said.stderr
