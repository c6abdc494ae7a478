"""Find and explain mismatches between a weight file and a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

Shape = tuple[int, ...]

_SHOWN = 3
_SIZE_WORDS = {128: ("nano",), 192: ("tiny",), 384: ("small",), 512: ("medium",), 1280: ("huge",)} | {
    768: ("base", "large"),
    1024: ("large",),
}


@dataclass(frozen=True)
class Mismatch:
    """Keys by what is wrong with them; `misshaped` maps a key to (shape in the file, shape in the model)."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshaped: dict[str, tuple[Shape, Shape]]


def find_mismatch(module: nn.Module, weights: Mapping[str, Tensor]) -> Mismatch:
    """Compare keys and shapes, in the order of the model and of the file."""
    own, file = _shapes(module.state_dict()), _shapes(weights)
    return Mismatch(
        missing=tuple(key for key in own if key not in file),
        unexpected=tuple(key for key in file if key not in own),
        misshaped={key: (file[key], own[key]) for key in own if key in file and file[key] != own[key]},
    )


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {key: tuple(value.shape) for key, value in weights.items()}


def _head_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the classification layers in timm's configuration; `head` without one."""
    named = _configuration(module).get("classifier") or "head"
    return (named,) if isinstance(named, str) else tuple(named)


def class_count(module: nn.Module, weights: Mapping[str, Tensor]) -> int | None:
    """The number of classes of the head in the file, if there is one."""
    head = weights.get(f"{_head_names(module)[0]}.weight")
    return None if head is None else int(head.shape[0])


def describe_mismatch(module: nn.Module, weights: Mapping[str, Tensor], source: str, notes: Sequence[str] = ()) -> str:
    """A message with the first keys of each kind, their shapes and counts, then the likely cause."""
    mismatch, own, file = find_mismatch(module, weights), _shapes(module.state_dict()), _shapes(weights)
    done = f" ({'; '.join(notes)})" if notes else ""
    parts = [
        _list("missing", [f"{key} {own[key]}" for key in mismatch.missing]),
        _list("unexpected", [f"{key} {file[key]}" for key in mismatch.unexpected]),
        _list(
            "of another shape",
            [f"{key} {file[key]} in the file, {own[key]} in the model" for key in mismatch.misshaped],
        ),
    ]
    return (
        f"the weights in '{source}' do not fit {_called(module)}{done}.\n"
        + "".join(f"  {part}\n" for part in parts if part)
        + f"Likely cause: {_likely_cause(mismatch, module, weights)}"
    )


def _list(what: str, entries: list[str]) -> str:
    if not entries:
        return ""
    more = f", ... ({len(entries) - _SHOWN} more)" if len(entries) > _SHOWN else ""
    return f"{len(entries)} {what}: {', '.join(entries[:_SHOWN])}{more}"


def _configuration(module: nn.Module) -> Mapping[str, Any]:
    found: Any = getattr(module, "pretrained_cfg", None)
    return found if isinstance(found, Mapping) else {}


def _called(module: nn.Module) -> str:
    return f"the model '{_configuration(module).get('architecture', type(module).__name__)}'"


def _likely_cause(mismatch: Mismatch, module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    keys = [*mismatch.missing, *mismatch.unexpected]
    heads = _head_names(module)
    in_head = {key for key in [*keys, *mismatch.misshaped] if key.rpartition(".")[0] in heads}
    if in_head and not mismatch.missing and not mismatch.unexpected and in_head == set(mismatch.misshaped):
        file, model = mismatch.misshaped[min(in_head, key=len)]
        return f"the file has {file[0]} classes, the model {model[0]}. Pass --num-classes {file[0]}."
    if mismatch.missing and in_head == set(mismatch.missing) == set(keys) and not mismatch.misshaped:
        return (
            "the file has no classification head: it was saved with num_classes=0, as self-supervised backbones are. "
            "Train a head first, or give a checkpoint that has one."
        )
    if len(mismatch.missing) == len(module.state_dict()):
        return _foreign_names(weights, mismatch)
    special = _special_part(mismatch)
    if special:
        return special
    variant = _fitting_variant(module, weights)
    if variant:
        return (
            f"another variant. The file fits '{variant}' in all keys and shapes: use that as MODEL, if that is what "
            "was trained (normalization comes with the name)."
        )
    return _structural_cause(mismatch, module, weights)


def _special_part(mismatch: Mismatch) -> str:
    """Parts by which published robust models differ from timm's of the same size, or ''."""
    unexpected, missing = set(mismatch.unexpected), set(mismatch.missing)
    if "fc_norm.weight" in unexpected and "norm.weight" in missing:
        return (
            "the file holds a ViT that averages its tokens (it has fc_norm, not norm), the model takes the class "
            "token. Pass --model-kwargs global_pool=avg."
        )
    if "fc_norm.weight" in missing and "norm.weight" in unexpected:
        return (
            "the model averages its tokens (fc_norm), the file holds a ViT that takes the class token (norm). "
            "Pass --model-kwargs global_pool=token."
        )
    if any(re.match(r"(patch_embed\.proj|stem)\.stem\.\d", key) for key in unexpected):
        return "the file holds a model with a convolutional stem (ConvStem): see `vitadel list models convstem`."
    if any(re.search(r"(meansparse\d|act\.0|drop_path\.1)\.threshold$", key) for key in unexpected):
        return "the file holds MeanSparse operators, which change what the model computes: see `vitadel list models`."
    tables = [pair for key, pair in mismatch.misshaped.items() if key.endswith("relative_position_bias_table")]
    if tables and tables[0][0][1:] == tables[0][1][1:]:
        file, model = ((math.isqrt(shape[0]) + 1) // 2 for shape in tables[0])
        return (
            f"the file has attention windows of {file} x {file} tokens, the model of {model} x {model}. Pass "
            f"--model-kwargs window_size={file}, or give MODEL the name with that window or image size."
        )
    return ""


def _foreign_names(weights: Mapping[str, Tensor], mismatch: Mismatch) -> str:
    prefix = next(iter(weights), "").split(".")[0] + "."
    if len(weights) > 1 and all(key.startswith(prefix) for key in weights):
        inner = {key.removeprefix(prefix) for key in weights}
        if inner == set(mismatch.missing):
            return f"a wrapper around the model: without '{prefix}' all keys fit. Save the file again without it."
        return f"all keys in the file start with '{prefix}': it holds another model, or one inside a wrapper."
    return f"none of the {len(mismatch.missing)} keys of the model is in the file: it holds a model of another family."


def _fitting_variant(module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """The timm model of the same family that has exactly the keys and shapes of the file, or ''."""
    architecture = str(_configuration(module).get("architecture", ""))
    width = _width(weights)
    if not architecture or width is None:
        return ""
    family = architecture.split("_")[0]
    shapes = _shapes(weights)
    words, size = _SIZE_WORDS.get(width, ()), architecture.rpartition("_")[2]
    names: list[str] = [
        name
        for name in timm.list_models(f"{family}*")
        if any(f"_{word}_" in name for word in words) and (size in name or not size.isdigit())
    ]
    # Similar names first: of several variants with the same shapes the plainest is the likely one.
    for name in sorted(names, key=lambda name: (abs(len(name) - len(architecture)), name))[:8]:
        if _built_shapes(name, class_count(module, weights) or 0) == shapes:
            return name
    return ""


def _built_shapes(name: str, num_classes: int) -> dict[str, Shape]:
    """Keys and shapes of a timm model, without allocating it."""
    try:
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False, num_classes=num_classes)
    except (RuntimeError, NotImplementedError, TypeError):
        return {}  # some constructors compute with values, which the meta device has not
    return _shapes(model.state_dict())


def _width(weights: Mapping[str, Tensor]) -> int | None:
    token = weights.get("cls_token")
    if token is None:
        token = weights.get("pos_embed")
    return None if token is None or token.ndim == 0 else int(token.shape[-1])


def _structural_cause(mismatch: Mismatch, module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    for marker, meaning in (
        ("dist_token", "a distilled DeiT (second class token)"),
        ("reg_token", "a variant with register tokens"),
        ("ls1.gamma", "a variant with LayerScale (DeiT III, DINOv2)"),
        ("q_norm.weight", "a variant that normalizes queries and keys"),
        ("position_scores", "an RVT with position-aware attention scaling (_plus in its name)"),
    ):
        if any(key.endswith(marker) for key in mismatch.unexpected):
            return f"the file holds {meaning}, the model is not. Give MODEL the name of that variant."
        if any(key.endswith(marker) for key in mismatch.missing):
            return f"the model is {meaning}, the file is not. Give MODEL the name of the plain variant."
    if len(mismatch.missing) > len(module.state_dict()) / 2:
        return f"{len(mismatch.missing)} keys of the model are not in the file: it holds a model of another family."
    own_width = _width(module.state_dict())
    width = _width(weights)
    if width != own_width and width is not None and own_width is not None:
        return f"another variant: the file has embeddings of width {width}, the model of {own_width}."
    depths = [
        len({key.split(".")[1] for key in side if key.startswith("blocks.")}) for side in (weights, module.state_dict())
    ]
    if depths[0] != depths[1]:
        return f"another variant: the file has {depths[0]} blocks, the model {depths[1]}."
    if not mismatch.unexpected and not mismatch.misshaped:
        return (
            f"the file lacks {len(mismatch.missing)} of {len(module.state_dict())} keys and holds no others: it is one "
            "part of a checkpoint, or was saved incompletely. Get the whole file."
        )
    if not mismatch.missing and not mismatch.misshaped:
        return (
            f"the file holds {len(mismatch.unexpected)} keys that the model has not: another version of it, or parts "
            "that were trained with it. They may change what it computes, so nothing was dropped."
        )
    if not mismatch.missing and not mismatch.unexpected and len(mismatch.misshaped) > len(module.state_dict()) / 2:
        name, (file, model) = next(iter(mismatch.misshaped.items()))
        return f"another size of this model: '{name}' is {file} in the file and {model} in the model."
    renamed = _renamed(mismatch, module, weights)
    if renamed:
        return renamed
    if "patch_embed.proj.weight" in mismatch.misshaped:
        file, model = mismatch.misshaped["patch_embed.proj.weight"]
        return (
            f"the file has patches of {file[-1]} pixels, the model of {model[-1]}. Give MODEL the name with that patch "
            f"size, or load it with small images (patch size {file[-1]}) if it was adapted to them."
        )
    if "pos_embed" in mismatch.misshaped:
        return _other_grid(*mismatch.misshaped["pos_embed"], module)
    if not mismatch.missing and not mismatch.unexpected:
        name, (file, model) = next(iter(mismatch.misshaped.items()))
        return (
            f"another variant of this model, or a file that was edited: '{name}' is {file} in the file and {model} in "
            "the model, and all names fit. Give MODEL the exact name it was trained as."
        )
    return "another variant or version of this model. Give MODEL the exact name it was trained as."


def _renamed(mismatch: Mismatch, module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    """The cause if as many keys are unexpected as are missing, with the same shapes; else ''."""
    own, file = _shapes(module.state_dict()), _shapes(weights)
    shapes = [
        sorted(side[key] for key in keys) for side, keys in ((own, mismatch.missing), (file, mismatch.unexpected))
    ]
    if not mismatch.missing or shapes[0] != shapes[1] or mismatch.misshaped:
        return ""
    missing = mismatch.missing[0]
    same = next(key for key in mismatch.unexpected if file[key] == own[missing])
    return (
        f"renamed keys: '{same}' in the file has the shape of '{missing}', which is missing. Give MODEL the exact name "
        "it was trained as, or rename the keys in the file."
    )


def _other_grid(file: Shape, model: Shape, module: nn.Module) -> str:
    embed: Any = getattr(module, "patch_embed", None)
    grid, patch = getattr(embed, "grid_size", None), getattr(embed, "patch_size", None)
    tokens = f"the file has {file[1]} position embeddings, the model {model[1]}"
    if grid is not None and patch is not None:
        side = math.isqrt(max(file[1] - (model[1] - grid[0] * grid[1]), 0))
        if side * side + model[1] - grid[0] * grid[1] == file[1]:
            pixels = side * patch[0]
            return f"{tokens}: it was trained on images of {pixels} pixels. Load it with input size {pixels}."
    return f"{tokens}: another input size, or another number of class and register tokens."
