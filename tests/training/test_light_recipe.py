"""The recipes of the light recipe against the thesis (Debenedetti 2022), section by section."""

from __future__ import annotations

from itertools import product

import pytest
import timm
import torch

from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose, rows
from vitadel.training.recipes.yaml_files import shipped_recipes

LIGHT = [name for name in shipped_recipes() if name.startswith("light/")]


def built(recipe, row):
    return build_recipe(compose(recipe, row), recipe)


def rate_at(recipe, epoch):
    factor = recipe.optimizer.lr_factor(recipe.train.batch_size)
    return factor * recipe.schedule.lr_at(recipe.optimizer.lr, recipe.train.epochs, epoch)


def size(model):
    with torch.device("meta"):  # shapes only
        return timm.create_model(model.name, **model.kwargs)


@pytest.mark.parametrize(("row", "rate"), [("caltech101", 5e-5), ("flowers102", 5e-5), ("cifar10", 2e-4)])
def test_rates_of_fine_tuning_are_not_scaled_with_the_batch(row, rate):
    """At the end of the warm-up the cosine has fallen to 85 % of the way: 5 of 20 epochs. Scaled, it was an eighth."""
    recipe = built("light/finetune", row)
    low = recipe.schedule.min_lr
    assert rate_at(recipe, 5) == pytest.approx(low + (rate - low) * (1 + 0.5**0.5) / 2)
    assert rate_at(recipe, 20) == pytest.approx(5e-6)
    assert rate_at(recipe, 0) == pytest.approx(1e-6)


def test_batches_of_fine_tuning():
    batches = {row: built("light/finetune", row).train.batch_size for row in rows("light/finetune")}
    assert batches == {"caltech101": 64, "flowers102": 64, "cifar10": 512}


@pytest.mark.parametrize(
    ("row", "images", "rate"),
    [("s12-4", 512, 5e-4), ("s12x64-4", 256, 1.6e-2), ("m12-4", 256, 1.6e-2), ("l12-4", 128, 8e-3)],
)
def test_batches_of_section_4_1_9(row, images, rate):
    """256 (L12: 128) images on each of 64 cores, and 5e-4 times the batch over 512 as the rate."""
    train = built("light/imagenet", row).train
    assert train.batch_size // train.grad_accum == images
    assert train.grad_accum == (1 if images == 512 else 64)
    recipe = built("light/imagenet", row)
    assert recipe.optimizer.lr * recipe.optimizer.lr_factor(train.batch_size) == pytest.approx(rate)


def test_all_sixteen_sets_of_augmentation_are_there_and_each_keeps_color_jitter():
    for kind in ("", "-standard"):
        names = [row for row in rows("light/augmentation") if row.endswith("-standard") == bool(kind)]
        sections = [built("light/augmentation", row).augmentation for row in names]
        found = {(s.mixup == 0.8, s.cutmix == 1.0, s.auto_augment is not None, s.reprob == 0.25) for s in sections}
        assert found == set(product((False, True), repeat=4))
        assert len(names) == 16
        assert {(s.color_jitter, s.hflip, s.crop) for s in sections} == {(0.4, 0.5, "resized")}
    parts = {"mixup": "mixup", "cutmix": "cutmix", "randaugment": "auto_augment", "erasing": "reprob"}
    for row in rows("light/augmentation"):
        name, section = row.removesuffix("-standard"), built("light/augmentation", row).augmentation
        named = set(parts) if name == "all" else set() if name == "none" else set(name.split("+"))
        assert named == {part for part, field in parts.items() if getattr(section, field)}


def test_repeated_augmentation_is_the_thesis_in_table_1_only():
    for row in rows("light/architectures"):
        section = built("light/architectures", row).augmentation
        assert (section.repeated_aug, section.repeated_aug_by) == (3, "batches")
    for name in set(LIGHT) - {"light/architectures"}:
        assert all(compose(name, row)["augmentation"].get("repeated_aug", 1) == 1 for row in rows(name))


def test_drop_path_is_that_of_the_architecture():
    found = {row: built("light/architectures", row).model.drop_path for row in ("deit-s", "cait-s12", "xcit-s12")}
    assert found == {"deit-s": 0.1, "cait-s12": 0.1, "xcit-s12": 0.05}
    assert built("light/components", "deit-s").model.drop_path == 0.1
    assert built("light/components", "xcit-s12").model.drop_path == 0.05
    assert built("light/epsilon-warmup", "0").model.drop_path == 0


def test_every_held_out_image_is_used_to_select_models():
    for name in LIGHT:
        for row in rows(name):
            document = compose(name, row)
            assert document["validation"]["limit"] is None, (name, row)
            assert document["validation"]["attack"] in ("pgd-10", None)


def test_images_come_from_the_sets_of_the_released_code():
    for name in ("architectures", "epsilon-warmup", "augmentation", "weight-decay"):
        data = compose(f"light/{name}", rows(f"light/{name}")[0])["data"]
        assert data["train"] == "imagenet:data/imagenet(classes=light-recipe)@train"
        assert data["test"] == "imagenet:data/imagenet(classes=light-recipe)@val"
    data = compose("light/finetune", "caltech101")["data"]
    assert (data["train"], data["test"], data["held_out"]) == ("caltech101@train", "caltech101@test", 5 * 102)


@pytest.mark.parametrize(
    ("row", "millions"),
    [("s12-4", 26.25), ("m12-4", 46.40), ("l12-4", 103.79), ("gelu-resnet50-4", 25.56), ("wide-resnet50-2-4", 68.88)],
)
def test_models_of_table_6_have_their_size(row, millions):
    model = size(built("light/imagenet", row).model)
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert any(type(part).__name__ == "GELU" for part in model.modules()) == (row != "wide-resnet50-2-4")
