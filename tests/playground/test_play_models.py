"""Which models and images there are to play with, and what their classes are called."""

from __future__ import annotations

import pytest
import torch

from vitadel.backbones.checkpoints import zoo_names
from vitadel.data.sources.shapes import CLASSES, Shapes
from vitadel.errors import UserError
from vitadel.playground.models import ModelCache, class_names


def cache(**settings: object) -> ModelCache:
    return ModelCache(**{"named": (), "data": "shapes", "device": torch.device("cpu"), **settings})  # type: ignore[arg-type]


def test_names_of_classes() -> None:
    assert class_names("zoo:shapes-robust", 10) == CLASSES
    assert class_names("zoo:cifar10-trades", 10)[:2] == ("airplane", "automobile")
    assert class_names("deit_tiny_patch16_224", 1000)[1] == "goldfish"
    assert class_names("runs/mine", 10) == tuple(f"class {n}" for n in range(10))  # not the shapes by chance
    assert class_names("runs/mine", 2, ("cat", "dog")) == ("cat", "dog")
    assert class_names("runs/mine", 3, ("cat", "dog")) == ("class 0", "class 1", "class 2")
    assert class_names("zoo:shapes-robust", 10, [f"other {n}" for n in range(10)]) == CLASSES


def test_images_by_number_with_their_true_class() -> None:
    chosen = cache().image(13)
    assert (chosen.index, chosen.label) == (13, CLASSES[3])
    opened = cache().open("zoo:shapes-standard")
    assert torch.equal(opened.pixels(chosen.picture) * 255, Shapes().render([13])[0].float())
    assert opened.knows_data
    for number in (-1, 10_000):
        with pytest.raises(UserError, match="0 to 9999"):
            cache().image(number)


def test_only_what_was_named_or_shipped_can_be_opened() -> None:
    named = "python:os:getcwd"  # a page must not be able to ask for code that no one named
    assert named not in cache().specs
    with pytest.raises(UserError, match="no model 'python:os:getcwd' here"):
        cache().open(named)


def test_the_page_begins_with_models_of_its_data() -> None:
    assert cache().pair == ("zoo:shapes-robust", "zoo:shapes-standard")
    assert cache(named=["zoo:shapes-standard"]).pair[0] == "zoo:shapes-standard"
    kinds = [spec.partition("-")[0] for spec in cache().specs]
    assert kinds == sorted(kinds, key=lambda kind: kind != "zoo:shapes")
    others = [spec.partition("-")[0] for spec in cache(data="cifar10@test").specs]
    assert others == sorted(others, key=lambda kind: kind != "zoo:cifar10")
    assert cache(data="folder:x").pair[0] in zoo_names()  # none is for these; the first must do


def test_zoo_models_of_other_data_can_be_shown_any_picture() -> None:
    other = next(spec for spec in zoo_names() if spec.startswith("zoo:cifar10-"))
    opened = cache().open(other)
    assert opened.names[0] == "airplane"
    assert not opened.knows_data
    assert opened.pixels(cache().image(0).picture).shape == (1, 3, 32, 32)
    named = cache(named=[other], data_is_named=True).open(other)  # as `vitadel ui zoo:cifar10-... --data shapes` does
    assert named.names[0] == "airplane"
    assert not named.knows_data


def test_named_models_come_first_with_their_options_and_few_stay_open() -> None:
    timm = ["vit_tiny_patch16_224", "deit_tiny_patch16_224"]
    small = {"depth": 1, "embed_dim": 24, "num_heads": 3, "img_size": 32, "patch_size": 8}
    options = {"model_options": {"weights": "random", "num_classes": 10, "kwargs": small}}
    some = cache(named=timm, options=options)
    assert some.specs[:2] == timm
    assert sorted(some.specs[2:]) == sorted(zoo_names())
    assert some.pair == (timm[0], "zoo:shapes-standard")
    for spec in (*timm, "zoo:shapes-standard", "zoo:shapes-robust"):
        some.open(spec)
    assert list(some._open) == [timm[1], "zoo:shapes-standard", "zoo:shapes-robust"]
    assert some.open(timm[1]).names[0] == "class 0"
    assert not some.open(timm[1]).knows_data
    assert cache(named=timm, options=options, data_is_named=True).open(timm[0]).names == CLASSES
