"""A checkpoint carries what is needed to build its model again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

from vitadel.backbones.checkpoints import build_classifier, load_classifier, read_record, save_classifier
from vitadel.backbones.classifier import Classifier, wrap
from vitadel.backbones.record import ModelRecord
from vitadel.backbones.timm_models import create_backbone
from vitadel.errors import UserError

KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
RECORD = ModelRecord(
    name="vit_tiny_patch16_224",
    num_classes=7,
    kwargs=KWARGS,
    mean=(0.1, 0.2, 0.3),
    std=(0.4, 0.5, 0.6),
    input_size=(32, 32),
    crop_pct=0.9,
    interpolation="bilinear",
    crop_mode="squash",
    notes={"about": "a test"},
)


def images(size: int = 32) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_json_round_trip_keeps_every_field() -> None:
    odd = replace(RECORD, kwargs={"img_size": (32, 48), "qkv_bias": False}, small_images=4)
    for record in (RECORD, odd, ModelRecord("wrapped")):
        assert ModelRecord.from_json(record.to_json()) == record
    assert ModelRecord.from_json(odd.to_json()).kwargs["img_size"] == (32, 48)


def test_saved_and_loaded_again_it_is_the_same_model(tmp_path: Path) -> None:
    model = build_classifier(RECORD)
    path = tmp_path / "new" / "model.safetensors"
    save_classifier(model, path)
    again = load_classifier(path)
    assert again.record == RECORD == read_record(path)
    assert not again.training
    assert torch.equal(again(images()), model(images()))
    assert [file.name for file in path.parent.iterdir()] == ["model.safetensors"]


def test_keys_in_the_file_are_timms_own(tmp_path: Path) -> None:
    model = build_classifier(RECORD)
    save_classifier(model, tmp_path / "m.safetensors")
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=7, **KWARGS).eval()
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"), strict=True)
    x = images()
    by_hand = (x - torch.tensor(RECORD.mean).view(3, 1, 1)) / torch.tensor(RECORD.std).view(3, 1, 1)
    torch.testing.assert_close(plain(by_hand), model(x))


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    model = build_classifier(RECORD)
    for name in ("a", "b"):
        save_classifier(model, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "xcit_nano_12_p16_224"])
def test_a_model_adapted_to_small_images_is_rebuilt_so(name: str, tmp_path: Path) -> None:
    kwargs = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    record = ModelRecord(name, 5, kwargs, input_size=(32, 32), small_images=4)
    model = build_classifier(record)
    save_classifier(model, tmp_path / "m.safetensors")
    again = load_classifier(tmp_path / "m.safetensors")
    assert torch.equal(again(images()), model(images()))
    assert model(images()).shape == (2, 5)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_classifier(build_classifier(RECORD), path)
    before = path.read_bytes()

    def breaks(_file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", breaks)
    with pytest.raises(KeyboardInterrupt):
        save_classifier(build_classifier(RECORD), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_tied_weights_can_be_saved(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, 12))
    module[2].weight = module[1].weight
    save_classifier(wrap(module), tmp_path / "tied.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "tied.safetensors")
    assert torch.equal(stored["1.weight"], stored["2.weight"])


def test_a_wrapped_model_says_how_to_load_it(tmp_path: Path) -> None:
    save_classifier(wrap(nn.Linear(3, 2)), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"recorded as 'wrapped' cannot be built.*python:package.module:function"):
        load_classifier(tmp_path / "w.safetensors")


def test_a_file_without_record_says_what_to_do(tmp_path: Path) -> None:
    safetensors.torch.save_file({"a": torch.zeros(2)}, tmp_path / "plain.safetensors")
    assert read_record(tmp_path / "plain.safetensors") is None
    with pytest.raises(UserError, match=r"plain.safetensors' has no model record.*--weights FILE"):
        load_classifier(tmp_path / "plain.safetensors")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "is not valid JSON"),
        ("[]", "holds list, not keys and values"),
        ("{}", "has schema None"),
        (json.dumps({"schema": 1, "name": "a", "colour": "red"}), "unknown field 'colour'"),
        (json.dumps({"schema": 1}), "'name' is wrong: Field required"),
        (json.dumps({"schema": 2, "name": "a"}), "schema 2, this version reads 1. Update"),
        (json.dumps({"schema": 1, "name": "a", "std": [0, 0, 0]}), "std must be three positive numbers"),
    ],
)
def test_a_damaged_record_is_a_user_error_with_the_file_name(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        ModelRecord.from_json(text, "runs/a.safetensors")
    assert said in str(caught.value)
    assert "runs/a.safetensors" in str(caught.value)


def test_fields_are_checked() -> None:
    with pytest.raises(UserError, match="at least 2 classes, got num_classes=1"):
        ModelRecord("a", num_classes=1)
    with pytest.raises(UserError, match="cannot be written"):
        ModelRecord("a", kwargs={"norm_layer": nn.LayerNorm}).to_json()


def test_unknown_names_tags_and_arguments() -> None:
    with pytest.raises(UserError, match=r"unknown model 'deit_tiny_patch16_244'; did you mean.*deit_tiny_patch16_224"):
        create_backbone("deit_tiny_patch16_244", None, {})
    with pytest.raises(UserError, match=r"no weights called 'fb_in2k'; did you mean fb_in1k\? Known: fb_in1k"):
        create_backbone("deit_tiny_patch16_224.fb_in2k", None, {})
    with pytest.raises(UserError, match=r"cannot be built with \{'depht': 2\}.*depht"):
        create_backbone("deit_tiny_patch16_224", None, {"depht": 2})


def test_record_and_classifier_agree_on_normalizing() -> None:
    assert RECORD.normalizes
    assert not ModelRecord("a").normalizes
    assert isinstance(build_classifier(RECORD), Classifier)
