"""A model and its data: what does not belong together is reported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import timm
from safetensors.torch import save_file

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import has_no_head
from vitadel.errors import UserError
from vitadel.evaluation.engine.target import Target, open_target


@pytest.mark.parametrize("data", ["shapes", "shapes(size=32)@test"])
def test_a_zoo_model_of_other_images_is_not_judged_on_the_built_in_ones(data):
    with pytest.raises(UserError, match=r"trained on cifar10.*--data cifar10@test"):
        open_target("zoo:cifar10-trades", data)


def test_a_zoo_model_of_shapes_is():
    assert open_target("zoo:shapes-robust", "shapes").model_spec == "zoo:shapes-robust"


def test_an_unknown_name_is_reported_as_such():
    with pytest.raises(UserError, match="unknown zoo model"):
        open_target("zoo:cifar10-tredes", "shapes")


def test_a_number_of_classes_is_only_advised_where_it_can_be_set(tmp_path):
    np.savez(tmp_path / "set.npz", images=np.zeros((2, 32, 32, 3), np.uint8), labels=np.array([0, 12]))
    data = f"npz:{tmp_path}/set.npz"

    def reported(model: str, **options: object) -> str:
        with pytest.raises(UserError, match="13 classes and the model 10: take a model for this data") as caught:
            open_target(model, data, model_options=options).selection(None, 0, False)
        return str(caught.value)

    assert "--num-classes" not in reported("zoo:shapes-robust")
    assert "with --weights random set --num-classes 13" in reported("rvt_micro_32", weights="random", num_classes=10)


def test_a_model_is_the_same_whatever_a_recipe_says_about_it():
    target = open_target("zoo:shapes-robust", "shapes")

    def noted(**notes: str) -> Target:
        record = replace(target.model.record, notes={**target.model.record.notes, **notes})
        return replace(target, model=Classifier(target.model.backbone, record))

    assert noted(about="words").model_fingerprint() == target.model_fingerprint()
    assert noted(tokens="some").model_fingerprint() != target.model_fingerprint()


def test_a_file_may_bring_the_head_that_a_release_lacks(tmp_path):
    name = "vit_small_patch14_dinov2.lvd142m"
    small = {"img_size": 28, "depth": 1, "embed_dim": 12, "num_heads": 2}
    for classes in (0, 5):
        model = timm.create_model(name.partition(".")[0], num_classes=classes, **small)
        save_file(model.state_dict(), tmp_path / f"{classes}.safetensors")
    assert has_no_head(name)
    assert has_no_head(name, str(tmp_path / "0.safetensors"))
    assert not has_no_head(name, str(tmp_path / "5.safetensors"))
    assert not has_no_head("vit_tiny_patch16_224")
