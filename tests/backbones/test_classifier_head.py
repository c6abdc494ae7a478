"""Models cut down to some of their classes: the same logits, fewer of them."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from toys import images
from vitadel.backbones.checkpoints import load_classifier, save_classifier
from vitadel.backbones.classifier_head import keep_classes
from vitadel.backbones.load import load_model
from vitadel.errors import UserError
from vits import make_vit

ZOO = "zoo:shapes-standard"
KEPT = [7, 2, 5]


def logits(model):
    with torch.no_grad():
        return model(images(4, side=32))


def test_logits_are_those_of_the_chosen_classes_in_their_order(tmp_path):
    whole, cut = load_model(ZOO), load_model(ZOO, head_classes=KEPT)
    torch.testing.assert_close(logits(cut), logits(whole)[:, KEPT])
    assert cut.record.num_classes == 3
    assert cut.record.name == whole.record.name
    save_classifier(cut, tmp_path / "cut.safetensors")
    assert torch.equal(logits(load_classifier(tmp_path / "cut.safetensors")), logits(cut))


def test_of_a_weight_file_with_more_classes(tmp_path):
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    name = "deit_tiny_patch16_224"
    whole = load_model(name, weights="random", kwargs=small)
    safetensors.torch.save_file(whole.backbone.state_dict(), tmp_path / "thousand.safetensors")
    given = {"weights": tmp_path / "thousand.safetensors", "kwargs": small}
    kept = [0, 217, 999]
    cut = load_model(name, head_classes=kept, **given)
    torch.testing.assert_close(logits(cut), logits(whole)[:, kept])
    assert torch.equal(logits(load_model(name, head_classes=kept, num_classes=3, **given)), logits(cut))
    with pytest.raises(UserError, match="3 classes are to be kept, but num_classes is 10"):
        load_model(name, head_classes=kept, num_classes=10, **given)


@pytest.mark.parametrize(
    ("kept", "message"),
    [([0, 99], "there is none of 99"), ([-1, 2], "none of -1"), ([1, 1], "each once"), ([3], "two")],
)
def test_classes_that_cannot_be_kept(kept, message):
    with pytest.raises(UserError, match=f"numbers from 0 to 9: .*{message}"):
        load_model(ZOO, head_classes=kept)


def test_a_head_that_cannot_be_cut():
    with pytest.raises(UserError, match="only one linear layer can be cut"):
        keep_classes(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)), [0, 1], "mine")
    with pytest.raises(UserError, match="new_head or head_classes, not both"):
        load_model(ZOO, head_classes=KEPT, new_head=True, num_classes=3)


def test_weights_keep_their_precision():
    model = make_vit("vit", classes=4).double()
    keep_classes(model, [3, 1], "mine")
    assert model.get_classifier().weight.dtype == torch.float64
