"""Weight files: what is read, what is refused without running it, and what is said when it does not fit."""

from __future__ import annotations

import argparse
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from torch import Tensor, nn

from vitadel.backbones.checkpoints import (
    build_classifier,
    fit_to,
    load_classifier,
    load_strict,
    read_checkpoint,
    read_metadata,
    save_classifier,
)
from vitadel.backbones.record import ModelRecord
from vitadel.errors import UserError

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.tensor([1.0, 2.0])}
KWARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


def make(name: str = "vit_tiny_patch16_224", **kwargs: Any) -> nn.Module:
    model: nn.Module = timm.create_model(name, **{**KWARGS, "num_classes": 10, **kwargs})
    return model


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in left)


# --- reading


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "no_suffix"])
def test_safetensors_are_known_by_content(name: str, tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / name, metadata={"who": "me"})
    assert read_checkpoint(tmp_path / name).weights.keys() == WEIGHTS.keys()
    assert torch.equal(read_checkpoint(tmp_path / name).weights["a.weight"], WEIGHTS["a.weight"])
    assert read_metadata(tmp_path / name) == {"who": "me"} == read_checkpoint(tmp_path / name).metadata


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.pth.tar", "w.ckpt"])
@pytest.mark.parametrize("modern", [True, False])
def test_torch_files_of_both_formats(name: str, modern: bool, tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / name, _use_new_zipfile_serialization=modern)
    assert same(read_checkpoint(tmp_path / name).weights, WEIGHTS)
    assert read_metadata(tmp_path / name) == {}


@pytest.mark.parametrize(
    "key", ["state_dict", "model", "model_state_dict", "net", "ema", "model_ema", "state_dict_ema"]
)
def test_containers_are_opened_and_the_choice_is_noted(key: str, tmp_path: Path) -> None:
    torch.save({"epoch": 3, key: WEIGHTS, "args": argparse.Namespace(lr=0.1)}, tmp_path / "w.pt")
    found = read_checkpoint(tmp_path / "w.pt")
    assert same(found.weights, WEIGHTS)
    assert found.notes == (f"weights taken from '{key}'",)


def test_averaged_weights_come_first_and_are_noted(tmp_path: Path) -> None:
    averaged = {key: value + 1 for key, value in WEIGHTS.items()}
    torch.save({"model": WEIGHTS, "model_ema": averaged, "optimizer": {"state": {}}}, tmp_path / "w.pt")
    found = read_checkpoint(tmp_path / "w.pt")
    assert same(found.weights, averaged)
    assert found.notes == ("weights taken from 'model_ema', not model which is there too",)


def test_containers_nest_and_scalars_beside_tensors_are_left_out(tmp_path: Path) -> None:
    torch.save({"state_dict": {"module": WEIGHTS}}, tmp_path / "nested.pt")
    assert same(read_checkpoint(tmp_path / "nested.pt").weights, WEIGHTS)
    torch.save({**WEIGHTS, "epoch": 3}, tmp_path / "mixed.pt")
    found = read_checkpoint(tmp_path / "mixed.pt")
    assert same(found.weights, WEIGHTS)
    assert found.notes == ("skipped entries that are not tensors: epoch",)


class Malice:
    """Unpickling this makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_a_malicious_pickle_is_refused_without_running_it(kind: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "evil.pth"
    content = {"state_dict": WEIGHTS, "extra": Malice(mark)}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(Malice(mark)))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(UserError, match=r"evil.pth' was refused.*Nothing was run.*safetensors.torch.save_file"):
        read_checkpoint(path)
    assert not mark.exists()
    if kind != "plain pickle":  # the test is worth something only if the file really bites
        torch.load(path, weights_only=False)
        assert mark.exists()


def test_a_whole_module_is_refused_and_the_class_is_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UserError, match=r"refused.*\(torch.nn.modules.linear.Linear\)"):
        read_checkpoint(tmp_path / "module.pt")


def _bytes_of_torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save(WEIGHTS, buffer)
    return buffer.getvalue()


def _bytes_of_npz() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.safetensors", safetensors.torch.save(WEIGHTS)[:-4], "cannot be read as a safetensors file"),
        ("noise.safetensors", bytes(range(256)) * 4, "cannot be read as a safetensors file"),
        ("none.safetensors", safetensors.torch.save({}), "holds no tensors"),
        ("cut.pt", _bytes_of_torch_file()[:200], "cannot be read as a torch file"),
        ("noise.pt", bytes(range(256)) * 4, "neither safetensors nor torch's format"),
        ("array.npz", _bytes_of_npz(), "cannot be read as a torch file"),
        ("empty.pt", b"", "is empty. Download or copy it again"),
        ("lfs.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer.*git lfs pull"),
        ("page.pt", b"\n<!DOCTYPE html><html>404</html>", "is a web page"),
    ],
)
def test_unreadable_files_are_named_with_the_reason(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_checkpoint(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_metadata_of_a_damaged_file_is_a_user_error_too(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(safetensors.torch.save(WEIGHTS)[:-4])
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        read_metadata(tmp_path / "w.safetensors")


def test_folders_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder, a weight file was expected"):
        read_checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"nothing.pt' does not exist"):
        read_checkpoint(tmp_path / "nothing.pt")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read: Not a directory"):
        read_checkpoint(tmp_path / "file" / "w.pt")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([torch.zeros(2)], "found list"),
        (torch.zeros(2), "found Tensor"),
        ({"epoch": 3, "lr": 0.1}, "found keys 'epoch', 'lr'"),
        ({"model": {"model": {"model": {"model": {"model": WEIGHTS}}}}}, "found keys 'model'"),
        ({}, "holds no state dict"),
    ],
)
def test_files_without_a_state_dict(content: object, said: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(UserError, match=said):
        read_checkpoint(tmp_path / "w.pt")


# --- renaming


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "backbone.", "module._orig_mod.", "model.module."]
)
def test_wrapper_prefixes_come_off_when_all_keys_then_fit(prefix: str) -> None:
    source, target = make(), make()
    weights = {prefix + key: value for key, value in source.state_dict().items()}
    fitted = load_strict(target, weights, "w.pt")
    assert same(target.state_dict(), source.state_dict())
    parts = [part + "." for part in prefix.split(".")[:-1]]
    assert fitted.notes == tuple(f"prefix '{part}' removed from all keys" for part in parts)


def test_keys_that_fit_are_left_alone() -> None:
    module = nn.Sequential()
    module.add_module("model", nn.Linear(2, 2))
    weights = {"model.weight": torch.ones(2, 2), "model.bias": torch.ones(2)}
    assert fit_to(module, weights).notes == ()
    load_strict(module, weights, "w.pt")
    assert torch.equal(module.state_dict()["model.weight"], torch.ones(2, 2))


@pytest.mark.parametrize(("outer", "inner"), [("normalize.", "model."), ("0.", "1."), ("module.0.", "module.1.")])
def test_a_normalizing_layer_around_the_model_is_understood(outer: str, inner: str) -> None:
    source, target = make(), make()
    weights = {
        f"{outer}mean": torch.tensor([0.1, 0.2, 0.3]),
        f"{outer}std": torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1),
    }
    weights |= {inner + key: value for key, value in source.state_dict().items()}
    fitted = load_strict(target, weights, "w.pt")
    assert same(target.state_dict(), source.state_dict())
    assert fitted.normalizer is not None
    assert fitted.normalizer[0] == pytest.approx((0.1, 0.2, 0.3))
    assert fitted.normalizer[1] == pytest.approx((0.4, 0.5, 0.6))
    assert "normalization taken from" in fitted.notes[0]


def test_official_xcit_names_are_understood() -> None:
    """The authors' files call the position encoding `pos_embeder` and keep q, k, v of class attention in one matrix."""
    source, target = make("xcit_nano_12_p16_224", patch_size=16), make("xcit_nano_12_p16_224", patch_size=16)
    weights = dict(source.state_dict())
    for kind in ("weight", "bias"):
        for block in (0, 1):
            parts = [weights.pop(f"cls_attn_blocks.{block}.attn.{letter}.{kind}") for letter in "qkv"]
            weights[f"cls_attn_blocks.{block}.attn.qkv.{kind}"] = torch.cat(parts)
        weights[f"pos_embeder.token_projection.{kind}"] = weights.pop(f"pos_embed.token_projection.{kind}")
    fitted = load_strict(target, {f"module.{key}": value for key, value in weights.items()}, "w.pt")
    assert same(target.state_dict(), source.state_dict())
    assert fitted.notes[-1] == "keys renamed by timm's rules for this family"


def test_timms_converter_may_not_resample_behind_the_users_back() -> None:
    def in_clip(model: nn.Module) -> dict[str, Tensor]:
        return {f"visual.trunk.{key}": value for key, value in model.state_dict().items()}

    source, target = make(), make()
    load_strict(target, in_clip(source), "w.pt")
    assert same(target.state_dict(), source.state_dict())
    assert set(fit_to(make(), in_clip(make(img_size=64))).weights) != set(target.state_dict())
    with pytest.raises(UserError, match=r"trained on images of 64 pixels. Load it with input size 64"):
        load_strict(make(), make(img_size=64).state_dict(), "w.pt")


def test_half_precision_weights_are_loaded_and_noted() -> None:
    source, target = make(), make()
    weights = {key: value.half() for key, value in source.state_dict().items()}
    assert load_strict(target, weights, "w.pt").notes == ("weights stored as float16",)
    expected = {key: value.half().float() for key, value in source.state_dict().items()}
    assert same(target.state_dict(), expected)


def test_a_classifier_saved_in_half_precision_is_read_as_its_rounded_weights(tmp_path: Path) -> None:
    model = build_classifier(ModelRecord("vit_tiny_patch16_224", 10, KWARGS, input_size=(32, 32)))
    save_classifier(model, tmp_path / "whole.safetensors")
    save_classifier(model, tmp_path / "half.safetensors", torch.float16)
    rounded = {key: value.half().float() for key, value in model.backbone.state_dict().items()}
    assert same(load_classifier(tmp_path / "half.safetensors").backbone.state_dict(), rounded)
    whole, half = (os.path.getsize(tmp_path / f"{name}.safetensors") for name in ("whole", "half"))
    assert 0.5 < half / whole < 0.6
    assert same(load_classifier(tmp_path / "whole.safetensors").backbone.state_dict(), model.backbone.state_dict())


# --- what does not fit


def complaint(module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    before = {key: value.clone() for key, value in module.state_dict().items()}
    with pytest.raises(UserError) as caught:
        load_strict(module, weights, "runs/w.pt")
    assert same(module.state_dict(), before), "a refused file must not have been loaded in part"
    text = str(caught.value)
    assert "the weights in 'runs/w.pt' do not fit the model" in text
    return text


def test_another_number_of_classes() -> None:
    text = complaint(make(), make(num_classes=7).state_dict())
    assert "2 of another shape: head.weight (7, 24) in the file, (10, 24) in the model, head.bias" in text
    assert text.endswith("the file has 7 classes, the model 10. Pass --num-classes 7.")


def test_another_number_of_classes_behind_a_prefix() -> None:
    text = complaint(make(), {f"module.{key}": value for key, value in make(num_classes=7).state_dict().items()})
    assert "(prefix 'module.' removed from all keys)" in text
    assert text.endswith("Pass --num-classes 7.")


def test_a_backbone_without_head() -> None:
    text = complaint(make(), make(num_classes=0).state_dict())
    assert "2 missing: head.weight (10, 24), head.bias (10,)" in text
    assert "the file has no classification head: it was saved with num_classes=0" in text


def test_keys_are_counted_and_the_first_three_shown() -> None:
    text = complaint(make(), make(depth=3).state_dict())
    assert (
        "12 unexpected: blocks.2.norm1.weight (24,), blocks.2.norm1.bias (24,), blocks.2.attn.qkv.weight (72, 24)"
        in text
    )
    assert ", ... (9 more)" in text
    assert text.endswith("another variant: the file has 3 blocks, the model 2.")


def test_another_width() -> None:
    text = complaint(make(), make(embed_dim=48).state_dict())
    assert text.endswith("another variant: the file has embeddings of width 48, the model of 24.")


def test_another_patch_size() -> None:
    text = complaint(make(), make(patch_size=4, img_size=16).state_dict())
    assert "the file has patches of 4 pixels, the model of 8" in text


def test_positions_that_fit_no_square() -> None:
    weights = dict(make().state_dict())
    weights["pos_embed"] = torch.zeros(1, 21, 24)
    text = complaint(make(), weights)
    assert text.endswith(
        "21 position embeddings, the model 17: another input size, or another number of class and register tokens."
    )


@pytest.mark.parametrize(
    ("name", "extra", "meaning"),
    [
        ("deit_tiny_distilled_patch16_224", {}, "a distilled DeiT"),
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, "a variant with register tokens"),
        ("vit_tiny_patch16_224", {"init_values": 1e-5}, r"a variant with LayerScale (DeiT III, DINOv2)"),
        ("vit_tiny_patch16_224", {"qk_norm": True}, "a variant that normalizes queries and keys"),
    ],
)
def test_variants_are_recognized_both_ways(name: str, extra: dict[str, Any], meaning: str) -> None:
    text = complaint(make(), make(name, **extra).state_dict())
    assert f"the file holds {meaning}" in text
    text = complaint(make(name, **extra), make().state_dict())
    assert f"the model is {meaning}" in text


def test_the_fitting_variant_is_named() -> None:
    with torch.device("meta"):
        larger = timm.create_model("deit_small_patch16_224", num_classes=10).state_dict()
        distilled = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=10).state_dict()
    asked = timm.create_model("deit_tiny_patch16_224", num_classes=10)
    assert "The file fits 'deit_small_patch16_224' in all keys and shapes" in complaint(asked, larger)
    assert "The file fits 'deit_tiny_distilled_patch16_224' in all" in complaint(asked, distilled)


def test_another_family() -> None:
    text = complaint(make(), {"conv1.weight": torch.zeros(2), "fc.weight": torch.zeros(2)})
    assert "none of the 32 keys of the model is in the file: it holds a model of another family" in text
    assert "do not fit the model 'vit_tiny_patch16_224'" in text
    text = complaint(make("xcit_nano_12_p16_224", patch_size=16), make().state_dict())
    assert text.endswith("keys of the model are not in the file: it holds a model of another family.")
    text = complaint(nn.Linear(2, 2), {"kernel": torch.zeros(2)})
    assert "do not fit the model 'Linear'" in text


def test_an_unknown_wrapper() -> None:
    weights = make().state_dict()
    text = complaint(make(), {f"student.{key}": value for key, value in weights.items()})
    assert text.endswith("a wrapper around the model: without 'student.' all keys fit. Save the file again without it.")
    text = complaint(make(), {"student.a": torch.zeros(1), "student.b": torch.zeros(1)})
    assert text.endswith("all keys in the file start with 'student.': it holds another model, or one inside a wrapper.")


def test_anything_else_still_gets_a_cause() -> None:
    weights = dict(make().state_dict())
    weights["blocks.0.mlp.fc1.weight"] = torch.zeros(50, 24)
    assert "'blocks.0.mlp.fc1.weight' is (50, 24) in the file and (96, 24) in the model" in complaint(make(), weights)
    del weights["blocks.0.mlp.fc1.weight"]
    weights["blocks.0.gate"] = torch.zeros(50, 24)
    assert complaint(make(), weights).endswith(
        "another variant or version of this model. Give MODEL the exact name it was trained as."
    )


# --- broken numbers


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_numbers_are_counted_and_named(value: float) -> None:
    weights = {key: tensor.clone() for key, tensor in make().state_dict().items()}
    weights["blocks.1.mlp.fc1.weight"].view(-1)[[3, 5]] = value
    with pytest.raises(
        UserError, match=r"w.pt: 'blocks.1.mlp.fc1.weight' has 2 of 2304 values that are NaN or infinite\. "
    ):
        load_strict(make(), weights, "w.pt")
    weights["norm.bias"][:] = value
    with pytest.raises(UserError, match=r"infinite; 2 tensors are affected\."):
        load_strict(make(), weights, "w.pt")


def test_a_mask_of_minus_infinity_is_no_damage() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    load_strict(module, {key: value.clone() for key, value in module.state_dict().items()}, "w.pt")
