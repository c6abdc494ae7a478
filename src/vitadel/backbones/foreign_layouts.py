"""Key layouts of other libraries, and how their keys are renamed to timm's: one row per layout.

A row has a key by which it is recognized, renamings of keys by regular expressions, and what else must be done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """One layout: `marker` matches a key that only it has; `finish` completes what renaming cannot do."""

    name: str
    marker: str
    renamings: tuple[tuple[str, str], ...]
    finish: Callable[[Weights, Shapes], Weights]

    def convert(self, weights: Weights, own: Shapes) -> Weights | None:
        """The weights under timm's names, or None if they have another layout."""
        if not any(re.fullmatch(self.marker, key) for key in weights):
            return None
        renamed: Weights = {}
        for key, value in weights.items():
            for pattern, replacement in self.renamings:
                key = re.sub(pattern, replacement, key)
            renamed[key] = value
        return self.finish(renamed, own) if len(renamed) == len(weights) else None


def _unchanged(weights: Weights, own: Shapes) -> Weights:
    return weights


def _later_downsampling(weights: Weights, own: Shapes) -> Weights:
    """In old Swin files the downsampling is the last part of a stage, in new ones the first part of the next."""
    return {
        re.sub(r"^layers\.(\d+)\.downsample\.", lambda m: f"layers.{int(m[1]) + 1}.downsample.", key): value
        for key, value in weights.items()
    }


def _clip_tower(weights: Weights, own: Shapes) -> Weights:
    """The image tower alone, with its projection as the head."""
    inside = {key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")}
    tower = inside or dict(weights)
    if "cls_token" in tower:
        tower["cls_token"] = tower["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in tower and tower["pos_embed"].ndim == 2:
        tower["pos_embed"] = tower["pos_embed"].unsqueeze(0)
    if "proj" in tower:
        tower["head.weight"] = tower.pop("proj").T.contiguous()
    return _with_zero_bias(tower, own, "head")


def _clip_trunk(weights: Weights, own: Shapes) -> Weights:
    inside = {key.removeprefix("visual."): value for key, value in weights.items() if key.startswith("visual.")}
    return _with_zero_bias(inside or dict(weights), own, "head.fc")


def _with_zero_bias(weights: Weights, own: Shapes, head: str) -> Weights:
    """CLIP's projection has no bias, timm's head has one."""
    bias, weight = f"{head}.bias", weights.get(f"{head}.weight")
    if bias in own and bias not in weights and weight is not None:
        weights[bias] = torch.zeros(weight.shape[0], dtype=weight.dtype)
    return weights


def _joined_qkv(weights: Weights, own: Shapes) -> Weights:
    """Queries, keys and values as one matrix, where transformers has three; reshapes tokens; drops masks."""
    joined: Weights = {}
    for key, value in weights.items():
        found = re.fullmatch(r"(.*\.attn)\.(query|key|value)\.(weight|bias)", key)
        if found is None:
            joined[key] = value
        elif found[2] == "query":
            parts = [weights.get(f"{found[1]}.{name}.{found[3]}") for name in ("query", "key", "value")]
            if any(part is None for part in parts):
                return weights
            joined[f"{found[1]}.qkv.{found[3]}"] = torch.cat([part for part in parts if part is not None])
    joined.pop("mask_token", None)  # of masked training only
    if "cls_token" in joined:
        joined["cls_token"] = joined["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in joined and joined["pos_embed"].ndim == 2:
        joined["pos_embed"] = joined["pos_embed"].unsqueeze(0)
    return _with_zero_bias(joined, own, "head")


_OLD_SWIN = Layout(
    name="the Swin layout of Microsoft and timm before 0.9",
    marker=r"layers\.0\.downsample\.reduction\.weight",
    renamings=((r"^head\.(weight|bias)$", r"head.fc.\1"),),
    finish=_later_downsampling,
)
_OPEN_CLIP = Layout(
    name="an image tower of CLIP or open_clip",
    marker=r"(visual\.)?class_embedding",
    renamings=(
        (r"^(visual\.)?class_embedding$", r"\1cls_token"),
        (r"^(visual\.)?positional_embedding$", r"\1pos_embed"),
        (r"^(visual\.)?conv1\.", r"\1patch_embed.proj."),
        (r"^(visual\.)?transformer\.resblocks\.", r"\1blocks."),
        (r"^(visual\.)?ln_pre\.", r"\1norm_pre."),
        (r"^(visual\.)?ln_post\.", r"\1norm."),
        (r"\.ln_([12])\.", r".norm\1."),
        (r"\.attn\.in_proj_(weight|bias)$", r".attn.qkv.\1"),
        (r"\.attn\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    ),
    finish=_clip_tower,
)
_OPEN_CLIP_TRUNK = Layout(
    name="an image tower of open_clip around a timm model",
    marker=r"(visual\.)?trunk\.stem\.0\.weight",
    renamings=(
        (r"^(visual\.)?trunk\.", r"\1"),
        (r"^(visual\.)?head\.proj\.weight$", r"\1head.fc.weight"),
    ),
    finish=_clip_trunk,
)
_BLOCKS_OF_TRANSFORMERS = (
    (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
    (r"\.attention\.q_proj\.", ".attn.query."),  # names of transformers 5 in memory; its files have the old ones
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(\d)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(vit|deit|dinov2)\.", ""),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
)
_TRANSFORMERS_VIT = Layout(
    name="ViT, DeiT or DINOv2 of transformers",
    marker=r"((vit|deit|dinov2)\.)?(encoder\.layer|layers)\.0\.attention\.(attention\.query|q_proj)\.weight",
    renamings=_BLOCKS_OF_TRANSFORMERS,
    finish=_joined_qkv,
)
_TRANSFORMERS_CLIP = Layout(
    name="the image tower of CLIP in transformers",
    marker=r"(vision_model\.)?encoder\.layers\.0\.self_attn\.q_proj\.weight",
    renamings=(
        (r"^vision_model\.", ""),
        (r"^encoder\.layers\.", "blocks."),
        (r"\.self_attn\.q_proj\.", ".attn.query."),
        (r"\.self_attn\.k_proj\.", ".attn.key."),
        (r"\.self_attn\.v_proj\.", ".attn.value."),
        (r"\.self_attn\.out_proj\.", ".attn.proj."),
        (r"\.layer_norm([12])\.", r".norm\1."),
        (r"^embeddings\.class_embedding$", "cls_token"),
        (r"^embeddings\.position_embedding\.weight$", "pos_embed"),
        (r"^embeddings\.patch_embedding\.", "patch_embed.proj."),
        (r"^pre_layrnorm\.", "norm_pre."),  # spelled so in transformers
        (r"^post_layernorm\.", "norm."),
        (r"^(visual_projection|classifier)\.", "head."),
    ),
    finish=lambda weights, own: _joined_qkv(
        {key: value for key, value in weights.items() if not key.startswith(("text_", "logit_scale"))}, own
    ),
)

LAYOUTS = (_OLD_SWIN, _OPEN_CLIP, _OPEN_CLIP_TRUNK, _TRANSFORMERS_VIT, _TRANSFORMERS_CLIP)
"""All known layouts."""
