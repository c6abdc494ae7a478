"""Published robust models against the logits of their original code, on weights filled by a formula."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from published_fill import fill, images, uniform
from vitadel.backbones.checkpoints import build_classifier
from vitadel.backbones.load import load_model
from vitadel.backbones.published import Published, catalogue, find_published, published_names
from vitadel.backbones.published_files import recognize
from vitadel.errors import UserError

FACTS = json.loads((Path(__file__).parents[1] / "published_facts.json").read_text("utf-8"))
QUICK = (
    *("mimir_convit_ti_cifar10", "mimir_vit_ti_gap_cifar10", "xcit_s12_cifar10", "mimir_cait_xxs24_imagenet"),
    *("xcit_s12_imagenet", "singh2023_vit_s_cvst"),
)
LAYOUTS = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FACTS]
TINY = "mimir_vit_ti_gap_cifar10"


def rule_of(key: str, shape: tuple[int, ...]) -> str:
    """How the formula fills a key."""
    last = key.rpartition(".")[2]
    if last in ("running_mean", "running_var", "temperature"):
        return last
    if re.fullmatch(r"gamma_?\d?", last):
        return "gamma"
    if last in ("cls_token", "pos_embed", "class_embedding", "positional_embedding"):
        return "token"
    if last == "proj" and len(shape) == 2:
        return "matrix_t"
    if last == "relative_position_bias_table":
        return "table"
    return "bias" if last.endswith("bias") else "matrix" if len(shape) > 1 else "norm"


def published_keys(layout: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the file, from those of our model."""
    if layout.startswith("mimir_swin"):  # Microsoft's layout, with the buffers that timm computes
        keys = {}
        for key, shape in shapes.items():
            key = re.sub(r"^layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", key)
            keys[key.replace("head.fc.", "head.")] = shape
            if key.endswith("relative_position_bias_table"):
                keys[key.replace("bias_table", "index")] = (49, 49)
        return keys | {"layers.0.blocks.1.attn_mask": (64, 49, 49)}
    if layout.startswith("clip_vit"):
        names = (
            *(("patch_embed.proj.", "conv1."), ("norm_pre.", "ln_pre."), (r"^norm\.", "ln_post.")),
            *((r"blocks\.", "transformer.resblocks."), (r"\.norm([12])\.", r".ln_\1."), ("qkv.", "in_proj_")),
            *((r"attn\.proj\.", "attn.out_proj."), ("mlp.fc1.", "mlp.c_fc."), ("mlp.fc2.", "mlp.c_proj.")),
        )
        keys = {}
        for key, shape in shapes.items():
            for ours, theirs in names:
                key = re.sub(ours, theirs, key)
            keys[key] = shape
        del keys["head.bias"]
        keys["proj"] = keys.pop("head.weight")[::-1]
        keys["class_embedding"] = keys.pop("cls_token")[2:]
        keys["positional_embedding"] = keys.pop("pos_embed")[1:]
        return keys
    return shapes


def published_weights(layout: str) -> dict[str, Tensor]:
    published = find_published(FACTS[layout]["model"])
    with torch.device("meta"):
        model = build_classifier(published.record()).backbone
    shapes = published_keys(layout, {key: tuple(value.shape) for key, value in model.state_dict().items()})
    weights = {}
    for key, shape in shapes.items():
        if key.endswith(("num_batches_tracked", "attn_mask", "relative_position_index")):
            weights[key] = torch.zeros(shape, dtype=torch.int64)
            continue
        weights[key] = torch.from_numpy(fill(rule_of(key, shape), key, shape))
    return weights


def probing(layout: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that show the eps of the first LayerNorm: its inputs are small."""
    starts = FACTS[layout]["scaled"]
    factors = {key: factor for key in weights for start, factor in starts.items() if key.startswith(start)}
    return weights | {key: weights[key] * factor for key, factor in factors.items()}


def contain(layout: str, weights: dict[str, Tensor]) -> object:
    """The weights in the container that these files have."""
    if layout.startswith("xcit"):
        more = {"epoch": 1, "step_count_global": 2, "hparams": {}, "metrics": {"top1": np.float64(70.0)}}
        return {**more, "model": weights, "model_ema": None}
    if layout.startswith("mimir_swin"):
        return {"model_state_dict": {f"module.base_model.{key}": value for key, value in weights.items()}}
    if layout.startswith("mimir"):
        options = argparse.Namespace(lr=0.1, output=Path("out"))
        return {"model": weights, "optimizer": {"param_groups": []}, "epoch": 1, "scaler": {}, "args": options}
    if layout.startswith("singh2023_repo"):
        return {f"module.base_model.{key}": value for key, value in weights.items()}
    if layout.startswith("singh2023"):
        return {"state_dict": {f"model.{key}": value for key, value in weights.items()}}
    return {"vision_encoder_state_dict": weights} if layout.startswith("clip") else weights


def saved(layout: str, folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    torch.save(contain(layout, published_weights(layout) if weights is None else weights), folder / "file.pth")
    return folder / "file.pth"


def opened(layout: str, path: Path) -> Any:
    published = find_published(FACTS[layout]["model"])
    raw = FACTS[layout].get("raw") and set(published.mean) != {0.0}
    return load_model(published.spec, weights=path, **({"mean": (0, 0, 0), "std": (1, 1, 1)} if raw else {}))


def check(logits: Tensor, expected: list[dict[str, Any]]) -> None:
    for row, image in zip(logits.double(), expected, strict=True):
        first = torch.tensor(image["first"], dtype=torch.float64)
        assert float((row[:6] - first).abs().max()) <= 1e-3 * float(first.abs().max())
        assert float(row.norm()) == pytest.approx(image["l2"], rel=1e-3)
        assert int(row.argmax()) == image["argmax"]


def test_the_formula_gives_the_published_numbers() -> None:
    assert uniform("image", 2).tolist() == [0.3248821118235662, 0.5550208844136959]
    assert fill("matrix", "head.weight", (1000, 384))[0, 0] == np.float32(-0.08336958289146423)
    assert images(224)[1, 2, 223, 223] == np.float32(0.23565393686294556)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_original_code(layout: str, tmp_path: Path) -> None:
    weights = published_weights(layout)
    model = opened(layout, saved(layout, tmp_path, weights))
    pixels = torch.from_numpy(images(model.record.input_size[0]))
    with torch.no_grad():
        check(model(pixels), FACTS[layout]["logits"])
        if "probe" in FACTS[layout]:
            model = opened(layout, saved(layout, tmp_path, probing(layout, weights)))
            check(model(pixels), FACTS[layout]["probe"])


def test_timms_eps_fails_the_probe(tmp_path: Path) -> None:
    """The probe is worth something only if a model that differs in eps alone fails it."""
    model = opened(TINY, saved(TINY, tmp_path, probing(TINY, published_weights(TINY))))
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5
    with torch.no_grad(), pytest.raises(AssertionError):
        check(model(torch.from_numpy(images(32))), FACTS[TINY]["probe"])


# --- the catalogue


def test_every_entry_is_complete_and_has_a_name_of_its_own() -> None:
    assert len(catalogue()) == 84
    assert len(published_names()) == 84
    for each in catalogue():
        assert find_published(each.spec.removeprefix("published:")) is each
        assert each.where
        assert each.norm in ("linf", "corruptions")
        assert (each.eps is None) == (each.norm == "corruptions")
        assert set(each.card()) >= {"model", "paper", "architecture", "preprocessing", "weights", "certainty"}
        assert each.numbers.get("autoattack", 0) < each.numbers.get("clean", 100)


def _architectures() -> list[Any]:
    seen: dict[tuple[Any, ...], Published] = {}
    for each in catalogue():
        seen.setdefault((each.model, str(each.kwargs), each.small_images, each.dataset), each)
    return [pytest.param(each, id=each.name) for each in seen.values()]


@pytest.mark.slow
@pytest.mark.parametrize("published", _architectures())
def test_every_architecture_has_the_published_number_of_parameters(published: Published) -> None:
    with torch.device("meta"):
        model = build_classifier(published.record()).backbone
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count - (published.embedding or 0) == published.parameters  # the head of a tower has a bias of zero


def test_names_that_are_used_twice_need_the_data_set() -> None:
    assert find_published("cifar10/debenedetti2022light_xcit-s12").size == 32
    with pytest.raises(
        UserError, match=r"names 3 models. Give one of published:imagenet/Debenedetti.*, published:cifar"
    ):
        find_published("Debenedetti2022Light_XCiT-S12")
    with pytest.raises(UserError, match=r"unknown published model 'Singh2023'.*list models --published"):
        find_published("Singh2023")


def test_weights_are_asked_for_with_the_place_where_they_are() -> None:
    with pytest.raises(UserError, match=r"needs its weights as --weights FILE.*ARES_ViT_small_patch16_224_AT.pth"):
        load_model("published:ares-vit-s")
    with pytest.raises(UserError, match="built as published; drop the arguments depth"):
        load_model("published:ares-vit-s", weights="w.pt", kwargs={"depth": 3})


def test_a_published_model_can_be_saved_and_opened_again(tmp_path: Path) -> None:
    from vitadel.backbones.checkpoints import load_classifier, save_classifier

    model = opened(TINY, saved(TINY, tmp_path))
    save_classifier(model, tmp_path / "again.safetensors")
    pixels = torch.from_numpy(images(32))
    assert torch.equal(load_classifier(tmp_path / "again.safetensors")(pixels), model(pixels))


# --- recognition


@pytest.mark.slow
def test_a_file_under_a_plain_name_is_recognized_and_nothing_is_changed(tmp_path: Path) -> None:
    path = saved("xcit_s12_imagenet", tmp_path)
    model = load_model("xcit_small_12_p16_224", weights=path)
    assert model.record.mean == pytest.approx((0.485, 0.456, 0.406))  # said, not silently changed
    looks = model.record.notes["looks like"]
    assert looks.startswith("this looks like published:imagenet/Debenedetti2022Light_XCiT-S12")
    assert "trained with no normalization (raw pixels)" in looks
    assert "--mean 0 --std 1" in looks
    assert "ImageNet mean and std" in model.record.notes["assumed"]
    assert "--no-normalize" in model.record.notes["assumed"]
    right = load_model("xcit_small_12_p16_224", weights=path, mean=(0, 0, 0), std=(1, 1, 1))
    assert "normalization" not in right.record.notes.get("assumed", "")
    with torch.no_grad():
        check(right(torch.from_numpy(images(224))), FACTS["xcit_s12_imagenet"]["logits"])


@pytest.mark.slow
def test_a_refused_file_is_recognized_too(tmp_path: Path) -> None:
    path = saved("singh2023_vit_s_cvst", tmp_path)
    with pytest.raises(UserError, match=r"convolutional stem.*looks like published:Singh2023Revisiting_ViT-S-ConvStem"):
        load_model("deit_small_patch16_224", weights=path)
    path = saved(TINY, tmp_path)
    with pytest.raises(UserError, match=r"looks like published:mimir-cifar-10-vit-t: use that as MODEL"):
        load_model("vit_tiny_patch16_224", weights=path, num_classes=10)


@pytest.mark.slow
def test_container_and_file_name_choose_among_models_of_one_architecture(tmp_path: Path) -> None:
    from vitadel.backbones.checkpoints import Checkpoint

    with torch.device("meta"):
        weights = build_classifier(find_published("ares-vit-b").record()).backbone.state_dict()
    found = {each.name for each in recognize(weights)}
    assert {"ares-vit-b", "singh-vit-b", "Mo2022When_ViT-B", "Tian2022Deeper_DeiT-B"} <= found
    by_container = recognize(weights, Checkpoint(weights, container=("state_dict", "epoch", "opt")))
    assert [each.name for each in by_container] == ["Mo2022When_ViT-B"]
    by_name = recognize(weights, None, tmp_path / "ARES_ViT_base_patch16_224_AT.pth")
    assert [each.name for each in by_name] == ["ares-vit-b"]
    prefixed = {f"module.base_model.{key}": value for key, value in weights.items()}
    assert [each.name for each in recognize(prefixed)] == ["singh-vit-b"]


def test_a_model_of_our_own_is_not_taken_for_a_published_one() -> None:
    from vits import make_vit

    assert recognize(make_vit("vit").state_dict()) == []
