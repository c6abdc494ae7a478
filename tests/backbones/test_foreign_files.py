"""Mutated and foreign weight files: each loads with the same logits, or is refused with the likely cause."""

from __future__ import annotations

import argparse
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitadel.backbones import published as published_module
from vitadel.backbones import published_files
from vitadel.backbones.checkpoints import build_classifier, load_strict, read_checkpoint
from vitadel.backbones.load import load_model
from vitadel.backbones.published import Published, find_published
from vitadel.errors import UserError

Weights = dict[str, Tensor]
_VIT = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 3}
_STEM = ((6, 2), (8, 2), (12, 2), (16, 2))
_SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}


def _tiny(name: str, original: str, **changes: Any) -> Published:
    return replace(find_published(original), name=name, size=32, parameters=10**6, file=f"{name}.pth", **changes)


TINY = {
    "pooled": _tiny("pooled", "mimir-cifar-10-vit-t", kwargs={**_VIT, "global_pool": "avg"}),
    "convstem": _tiny("convstem", "Singh2023Revisiting_ViT-S-ConvStem", kwargs={**_VIT, "stem": _STEM}),
    "old-swin": _tiny("old-swin", "Xu2024MIMIR_Swin-B", kwargs=_SWIN),
    "clip": _tiny("clip", "fare4-clip-vit-b-16-(laion)", kwargs=_VIT, embedding=20),
    "xcit": _tiny(
        "xcit",
        "imagenet/Debenedetti2022Light_XCiT-S12",
        kwargs={"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 3},
    ),
}
CLIP_NAMES = (
    *((r"patch_embed\.proj\.", "conv1."), (r"norm_pre\.", "ln_pre."), (r"^norm\.", "ln_post.")),
    *((r"blocks\.", "transformer.resblocks."), (r"\.norm([12])\.", r".ln_\1."), (r"qkv\.", "in_proj_")),
    *((r"attn\.proj\.", "attn.out_proj."), (r"mlp\.fc1\.", "mlp.c_fc."), (r"mlp\.fc2\.", "mlp.c_proj.")),
)


def as_published(name: str, weights: Weights) -> Weights:
    """The weights under the keys of the published file."""
    if name == "old-swin":
        renamed: Weights = {}
        for key, value in weights.items():
            key = re.sub(r"^layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", key)
            renamed[key.replace("head.fc.", "head.")] = value
        return renamed | {"layers.0.blocks.1.attn_mask": torch.zeros(4, 16, 16)}
    if name == "clip":
        renamed = {}
        for key, value in weights.items():
            for ours, theirs in CLIP_NAMES:
                key = re.sub(ours, theirs, key)
            renamed[key] = value
        del renamed["head.bias"]
        renamed["proj"] = renamed.pop("head.weight").T.contiguous()
        renamed["class_embedding"] = renamed.pop("cls_token")[0, 0]
        renamed["positional_embedding"] = renamed.pop("pos_embed")[0]
        return renamed
    return weights


def made(name: str, seed: int = 0, **kwargs: Any) -> Weights:
    """Random weights of the model, or of one with other arguments, as a published file has them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        weights = build_classifier(TINY[name].record(kwargs)).backbone.state_dict()
        weights = {k: v + 0.1 * torch.randn_like(v) if v.is_floating_point() else v for k, v in weights.items()}
    if "head.bias" in weights and name == "clip":
        weights["head.bias"].zero_()  # a projection has none
    return as_published(name, weights)


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (published_module, published_files):
        monkeypatch.setattr(module, "catalogue", lambda: tuple(TINY.values()))


def logits_of(name: str, content: object, folder: Path) -> Tensor:
    torch.save(content, folder / "w.pth")
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits: Tensor = load_model(f"published:{name}", weights=folder / "w.pth")(pixels)
    return logits


# --- mutations


def _drop(place: float) -> Callable[[Weights], Weights]:
    def mutate(weights: Weights) -> Weights:
        keys = [key for key in weights if not key.endswith(("num_batches_tracked", "attn_mask"))]
        del weights[keys[int(place * (len(keys) - 1))]]
        return weights

    return mutate


def _rename(place: float, to: str) -> Callable[[Weights], Weights]:
    def mutate(weights: Weights) -> Weights:
        keys = list(weights)
        old = keys[int(place * (len(keys) - 1))]
        return {to.format(old) if key == old else key: value for key, value in weights.items()}

    return mutate


def _reshape(change: Callable[[Tensor], Tensor], suffix: str) -> Callable[[Weights], Weights]:
    def mutate(weights: Weights) -> Weights:
        key = next(key for key in weights if key.endswith(suffix))
        return {**weights, key: change(weights[key])}

    return mutate


def _prefix(prefix: str) -> Callable[[Weights], Weights]:
    return lambda weights: {prefix + key: value for key, value in weights.items()}


def _half(weights: Weights) -> Weights:
    return dict(list(weights.items())[: len(weights) // 2])


def _later_half(weights: Weights) -> Weights:
    return dict(list(weights.items())[len(weights) // 2 :])


def _add(key: str, shape: tuple[int, ...]) -> Callable[[Weights], Weights]:
    return lambda weights: {**weights, key: torch.zeros(shape)}


def _normalizer(mean: float) -> Callable[[Weights], Weights]:
    def mutate(weights: Weights) -> Weights:
        layer = {"normalize.mean": torch.full((1, 3, 1, 1), mean), "normalize.std": torch.ones(1, 3, 1, 1)}
        return layer | {f"model.{key}": value for key, value in weights.items()}

    return mutate


MUTATIONS: dict[str, Callable[[Weights], Any]] = {
    "untouched": lambda weights: weights,
    "without the first": _drop(0.0),
    "without one in the middle": _drop(0.5),
    "without the last": _drop(1.0),
    "first renamed": _rename(0.0, "old_{}"),
    "middle renamed": _rename(0.5, "{}_v2"),
    "a norm with an axis more": _reshape(lambda value: value[None], "norm1.bias"),
    "a wider bias": _reshape(lambda value: torch.cat([value, value]), "mlp.fc1.bias"),
    "an extra head": _add("aux_head.weight", (5, 24)),
    "an extra buffer": _add("layers.0.blocks.0.attn.relative_position_index", (16, 16)),
    "module.": _prefix("module."),
    "module.base_model.": _prefix("module.base_model."),
    "net.": _prefix("net."),
    "backbone.": _prefix("backbone."),
    "_orig_mod.model.": _prefix("_orig_mod.model."),
    "an unknown prefix": _prefix("student."),
    "first half": _half,
    "second half": _later_half,
    "a wrong normalization layer": _normalizer(0.7),
    "in 'state_dict'": lambda weights: {"state_dict": weights, "epoch": 3},
    "of Lightning": lambda weights: {
        "state_dict": {f"model.{key}": value for key, value in weights.items()},
        "pytorch-lightning_version": "2.0",
        "hyper_parameters": {"lr": 0.1},
    },
    "averaged beside others": lambda weights: {
        "model": {key: value * 0 for key, value in weights.items()},
        "model_ema": weights,
        "args": argparse.Namespace(lr=np.float64(0.1)),
    },
}
LOADS = {
    *("untouched", "module.", "module.base_model.", "net.", "backbone.", "_orig_mod.model.", "in 'state_dict'"),
    *("of Lightning", "averaged beside others"),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutated_file_loads_with_equal_logits_or_is_refused(name: str, mutation: str, tmp_path: Path) -> None:
    weights = made(name)
    expected = logits_of(name, weights, tmp_path)
    mutate = MUTATIONS[mutation]
    if name == "clip" and mutation == "a norm with an axis more":
        mutate = _reshape(lambda value: value[None], "ln_1.bias")
    if name == "clip" and mutation == "a wider bias":
        mutate = _reshape(lambda value: torch.cat([value, value]), "mlp.c_fc.bias")
    content = mutate(dict(weights))
    ignored = mutation == "an extra buffer"  # computed by the model, known by its name
    if mutation in LOADS or ignored:
        assert torch.equal(logits_of(name, content, tmp_path), expected)
        return
    with pytest.raises(UserError) as caught:
        logits_of(name, content, tmp_path)
    message = str(caught.value)
    assert "Likely cause: " in message or "normalization layer" in message
    assert "another variant or version of this model" not in message, "no cause was found"


@pytest.mark.parametrize("name", TINY)
def test_weights_of_another_size_are_refused(name: str, tmp_path: Path) -> None:
    larger: dict[str, Any] = {"embed_dim": 48}
    for change in (larger, {"depths": (2, 4)} if name == "old-swin" else {"depth": 3}):
        with pytest.raises(UserError, match=r"(?s)do not fit the model.*Likely cause: .*published:"):
            logits_of(name, made(name, **change), tmp_path)


def test_a_file_cut_short_is_refused_at_any_length(tmp_path: Path) -> None:
    torch.save(made("pooled"), tmp_path / "whole.pth")
    content = (tmp_path / "whole.pth").read_bytes()
    for share in (0.001, 0.1, 0.5, 0.9, 0.999):
        (tmp_path / "cut.pth").write_bytes(content[: int(share * len(content))])
        with pytest.raises(UserError, match=r"cannot be read as a torch file: .*(not complete|Copy or download it)"):
            load_model("published:pooled", weights=tmp_path / "cut.pth")


# --- files of other programs


def test_files_of_other_frameworks_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(512))
    (tmp_path / "model.onnx").write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.0.0")
    table_end = bytes(40) + struct.pack("<Q", 0xDB4775248B80FB57)  # the last bytes of TensorFlow's tables of tensors
    (tmp_path / "one-file.ckpt").write_bytes(bytes(1000) + table_end)
    (tmp_path / "several.ckpt.index").write_bytes(b"\x00\x00\x0a\x08\x01" + table_end)
    (tmp_path / "several.ckpt.data-00000-of-00001").write_bytes(bytes(64))
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "several.ckpt"\n')
    torch.jit.save(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "script.pt")
    np.savez(tmp_path / "arrays.pth", a=np.zeros(2))
    for name, said in {
        "model.h5": "an HDF5 file, as Keras writes them",
        "model.onnx": "an ONNX graph",
        "one-file.ckpt": "a TensorFlow checkpoint",
        "several.ckpt": "a TensorFlow checkpoint",
        "several.ckpt.index": "a TensorFlow checkpoint or a part of one",
        "several.ckpt.data-00000-of-00001": "a TensorFlow checkpoint or a part of one",
        "checkpoint": "TensorFlow's list of its checkpoints",
        "script.pt": "a TorchScript program, which holds code",
        "arrays.pth.npz": "an archive of NumPy arrays",
    }.items():
        with pytest.raises(UserError, match=f"{said}.*not PyTorch weights. Convert it to PyTorch first"):
            read_checkpoint(tmp_path / name)


def test_the_state_of_an_optimizer_is_no_model(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    for content in (optimizer.state_dict(), {"epoch": 1, "optimizer": optimizer.state_dict()}):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(UserError, match=r"found the state of an optimizer only.*Give the file with the weights"):
            read_checkpoint(tmp_path / "w.pt")


def test_numpy_numbers_and_arrays_are_harmless(tmp_path: Path) -> None:
    numbers = {"loss": np.float64(1.5), "steps": np.int64(3), "curve": np.zeros(3, np.float32), "out": Path("x")}
    torch.save({"model": {"a": torch.ones(2)}, "metrics": numbers}, tmp_path / "w.pt")
    assert torch.equal(read_checkpoint(tmp_path / "w.pt").weights["a"], torch.ones(2))


# --- transformers, the real library


def _real(kind: str) -> tuple[nn.Module, str, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
    sizes |= {"intermediate_size": 96}
    arguments = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3}
    if kind == "vit":
        config = transformers.ViTConfig(**sizes, num_labels=5)
        return transformers.ViTForImageClassification(config), "vit_tiny_patch16_224", arguments
    if kind == "deit":
        config = transformers.DeiTConfig(**sizes, num_labels=5)
        model = transformers.DeiTForImageClassificationWithTeacher(config)
        return model, "deit_tiny_distilled_patch16_224", arguments
    if kind == "clip":
        config = transformers.CLIPVisionConfig(**sizes, projection_dim=5)
        return transformers.CLIPVisionModelWithProjection(config), "vit_base_patch16_clip_quickgelu_224", arguments
    config = transformers.Dinov2Config(**{**sizes, "mlp_ratio": 4})
    return transformers.Dinov2Model(config), "vit_small_patch14_dinov2", {**arguments, "num_classes": 0}


@pytest.mark.parametrize("kind", ["vit", "deit", "clip", "dinov2"])
def test_files_of_transformers_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    import timm

    torch.manual_seed(0)
    theirs, name, arguments = _real(kind)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        found = theirs.eval()(pixel_values=x)[{"clip": "image_embeds", "dinov2": "pooler_output"}.get(kind, "logits")]
    theirs.save_pretrained(tmp_path)
    for weights in (theirs.state_dict(), read_checkpoint(tmp_path / "model.safetensors").weights):  # names may differ
        ours = timm.create_model(name, **{"num_classes": 5, **arguments})
        fitted = load_strict(ours, weights, "w.safetensors")
        assert any("transformers" in note for note in fitted.notes)
        with torch.no_grad():
            assert torch.allclose(ours.eval()(x), found, atol=1e-5)
