"""Where the blocks and attention modules of each family of vision transformers are: one row per family.

A row names classes instead of importing them, so that the table loads no model code. A new family needs one row if its
attention modules

- have `num_heads` or `num_attention_heads`;
- form scores of shape (batch, heads, queries, keys) by one product of queries and keys, as their first product of two
  four-dimensional tensors, and turn them into probabilities by one softmax;
- or call `F.scaled_dot_product_attention`, as `nn.MultiheadAttention` does.

These are the two seams of attention: content scores are scaled at the product, maps and scores are read at the softmax.
Position biases and masks are added between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import cast

from torch import nn

from vitadel.errors import UserError


class ScoreSeam(Enum):
    """Which part of the pre-softmax scores a factor multiplies."""

    CONTENT = "content"
    """The product of queries and keys, before position biases and masks are added: a scaled mask of -100 would let
    shifted windows leak into each other."""

    WHOLE = "whole"
    """The input of the softmax. For talking heads: a linear map over heads, with a bias, follows the product."""


@dataclass(frozen=True)
class TokenSeam:
    """Extra prefix tokens are added to the output of module `enter` and removed from the input of module `leave`.

    `width` is the backbone's attribute with the width of tokens; it may be inside another one: 'config.hidden_size'.
    """

    enter: str = "norm_pre"
    leave: str = "norm"
    width: str = "embed_dim"


@dataclass(frozen=True)
class Anatomy:
    """One family: how to recognize it and where its seams are.

    `classes` are full names of backbone classes (subclasses count). `blocks` and `attentions` are bare class names,
    looked up inside the backbone in the order of registration, which is the order of execution. `prefix` is the number
    of class and register tokens before the patches in the first block, or the name of the backbone's attribute, or
    several of these to be added; class-attention blocks add their class token later. `class_token` is the backbone's
    attribute with it, if there is one. `tokens` is None if extra tokens are not possible, and
    `no_tokens` then says why. `norm_is_next`: the final norm takes the output of the last of `blocks`. `over_channels`
    names the attentions whose maps are over channels instead of tokens.
    """

    classes: tuple[str, ...]
    blocks: tuple[str, ...]
    attentions: Mapping[str, ScoreSeam] = field(default_factory=partial(dict, Attention=ScoreSeam.CONTENT))
    prefix: str | int | tuple[str | int, ...] = 0
    class_token: str = "cls_token"
    tokens: TokenSeam | None = None
    no_tokens: str = ""
    norm_is_next: bool = True
    over_channels: tuple[str, ...] = ()


_CONTENT, _WHOLE = ScoreSeam.CONTENT, ScoreSeam.WHOLE
_POOLS = {"AttentionPoolLatent": _CONTENT, "AttentionPoolPrr": _CONTENT}
_FIXED_PAIRS = "its position bias has one number per pair of positions, and extra tokens have no position"
_STAGES = "its stages resize the grid of tokens, and extra tokens have no place in the grid"
_GRID_ONLY = "its blocks are made for a grid of tokens, without any prefix, and extra tokens have no place in the grid"
_LATE_CLASS = "its class token joins in the class-attention blocks only, so there is no prefix to extend"
_LATE_CLASS_ON_GRID = _LATE_CLASS + "; besides, its blocks convolve over the grid of tokens"

_AFTER_EMBEDDINGS = TokenSeam("embeddings", "layernorm", "config.hidden_size")


def _hugging_face(
    package: str,
    start: str,
    classes: Sequence[str],
    *,
    prefix: int | tuple[str | int, ...] = 1,
    class_token: str = "embeddings.cls_token",
    tokens: TokenSeam | None = None,
    no_tokens: str = "",
) -> Anatomy:
    """A row for transformers: names begin alike, and older versions have a module around their self-attention."""
    return Anatomy(
        classes=tuple(f"transformers.models.{package}.modeling_{package}.{name}" for name in classes),
        blocks=(f"{start}Layer", f"{start}EncoderLayer"),
        attentions={f"{start}Attention": _CONTENT, f"{start}SelfAttention": _CONTENT},
        prefix=prefix,
        class_token=class_token,
        tokens=tokens,
        no_tokens=no_tokens,
    )


ANATOMIES: dict[str, Anatomy] = {
    "vit": Anatomy(
        classes=("timm.models.vision_transformer.VisionTransformer",),
        blocks=("Block", "ResPostBlock", "ParallelScalingBlock", "ParallelThingsBlock", "DiffParallelScalingBlock"),
        attentions={"Attention": _CONTENT, "ParallelScalingBlock": _CONTENT, **_POOLS},
        prefix="num_prefix_tokens",
        tokens=TokenSeam(),
    ),
    "eva": Anatomy(
        classes=("timm.models.eva.Eva",),
        blocks=("EvaBlock", "EvaBlockPostNorm"),
        attentions={"EvaAttention": _CONTENT, "AttentionRope": _CONTENT, **_POOLS},
        prefix="num_prefix_tokens",
        tokens=TokenSeam(),
    ),
    "beit": Anatomy(
        classes=("timm.models.beit.Beit",),
        blocks=("Block",),
        prefix="num_prefix_tokens",
        no_tokens=_FIXED_PAIRS,
    ),
    "pit": Anatomy(
        classes=("timm.models.pit.PoolingVisionTransformer",),
        blocks=("Block",),
        prefix="num_tokens",
        no_tokens=_STAGES,
    ),
    "cait": Anatomy(
        classes=("timm.models.cait.Cait",),
        blocks=("LayerScaleBlock", "LayerScaleBlockClassAttn"),
        attentions={"TalkingHeadAttn": _WHOLE, "ClassAttn": _CONTENT},
        no_tokens=_LATE_CLASS,
    ),
    "xcit": Anatomy(
        classes=("timm.models.xcit.Xcit",),
        blocks=("XCABlock", "ClassAttentionBlock"),
        attentions={"XCA": _CONTENT, "ClassAttn": _CONTENT},
        no_tokens=_LATE_CLASS_ON_GRID,
        over_channels=("XCA",),
    ),
    "swin": Anatomy(
        classes=("timm.models.swin_transformer.SwinTransformer",),
        blocks=("SwinTransformerBlock",),
        attentions={"WindowAttention": _CONTENT},
        no_tokens=_STAGES,
    ),
    "swinv2": Anatomy(
        classes=("timm.models.swin_transformer_v2.SwinTransformerV2",),
        blocks=("SwinTransformerV2Block",),
        attentions={"WindowAttention": _CONTENT},
        no_tokens=_STAGES,
    ),
    "levit": Anatomy(
        classes=("timm.models.levit.Levit",),
        blocks=("LevitDownsample", "LevitBlock"),
        attentions={"AttentionDownsample": _CONTENT, "Attention": _CONTENT},
        no_tokens=_STAGES,
    ),
    "fan": Anatomy(  # attention over tokens only, not the channel gate or class attention
        classes=("vitadel.backbones.families.fan.Fan",),
        blocks=("FanBlock",),
        attentions={"TokenAttention": _CONTENT},
        no_tokens=_LATE_CLASS_ON_GRID,
        norm_is_next=False,
    ),
    "rvt": Anatomy(
        classes=("vitadel.backbones.families.rvt.RVT",),
        blocks=("Block",),
        no_tokens=_GRID_ONLY,
    ),
    "torchvision-vit": Anatomy(
        classes=("torchvision.models.vision_transformer.VisionTransformer",),
        blocks=("EncoderBlock",),
        attentions={"MultiheadAttention": _CONTENT},
        prefix=1,
        class_token="class_token",
        tokens=TokenSeam("encoder.dropout", "encoder.ln", "hidden_dim"),
    ),
    "torchvision-swin": Anatomy(
        classes=("torchvision.models.swin_transformer.SwinTransformer",),
        blocks=("SwinTransformerBlock",),
        attentions={"ShiftedWindowAttention": _CONTENT},
        no_tokens=_STAGES,
    ),
    "hf-vit": _hugging_face("vit", "ViT", ("ViTModel",), tokens=_AFTER_EMBEDDINGS),
    "hf-deit": _hugging_face("deit", "DeiT", ("DeiTModel",), prefix=2, tokens=_AFTER_EMBEDDINGS),
    "hf-beit": _hugging_face("beit", "Beit", ("BeitModel",), no_tokens=_FIXED_PAIRS),
    "hf-dinov2": _hugging_face("dinov2", "Dinov2", ("Dinov2Model",), tokens=_AFTER_EMBEDDINGS),
    "hf-dinov2-registers": _hugging_face(
        "dinov2_with_registers",
        "Dinov2WithRegisters",
        ("Dinov2WithRegistersModel",),
        prefix=(1, "config.num_register_tokens"),
        tokens=_AFTER_EMBEDDINGS,
    ),
    "hf-clip": _hugging_face(
        "clip",
        "CLIP",
        ("CLIPVisionModel", "CLIPVisionTransformer"),
        class_token="embeddings.class_embedding",
        no_tokens="its final norm sees the class token only, so extra tokens have no place to leave",
    ),
    "hf-siglip": _hugging_face(  # its pooling head is not used for classification
        "siglip",
        "Siglip",
        ("SiglipVisionModel", "SiglipVisionTransformer"),
        prefix=0,
        tokens=TokenSeam("embeddings", "post_layernorm", "config.hidden_size"),
    ),
    "hf-swin": _hugging_face("swin", "Swin", ("SwinModel",), prefix=0, no_tokens=_STAGES),
}


@dataclass(frozen=True)
class Part:
    """A module and its name inside the backbone."""

    name: str
    module: nn.Module


@dataclass(frozen=True)
class SoftmaxAttention:
    """An attention module, its name inside the backbone, its number of heads and its score seam."""

    name: str
    module: nn.Module
    heads: int
    seam: ScoreSeam
    over_channels: bool = False


def _full_names(module: nn.Module) -> list[str]:
    """The module's class and its ancestors, the class first."""
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]


def _family(module: nn.Module) -> str | None:
    """The row of the module's class, or else of its nearest ancestor that has one."""
    rows = {name: family for family, row in ANATOMIES.items() for name in row.classes}
    return next((rows[name] for name in _full_names(module) if name in rows), None)


def _backbones(module: nn.Module) -> list[nn.Module]:
    """The outermost modules of a known family, in order."""
    if _family(module) is not None:
        return [module]
    return [found for child in module.children() for found in _backbones(child)]


def _unwrapped(module: nn.Module) -> nn.Module:
    """The model inside parallel, compiled and normalizing wrappers."""
    for name in ("_orig_mod", "module", "backbone"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return _unwrapped(inner)
    return module


def backbone_of(model: nn.Module) -> nn.Module:
    """The module of a known family inside `model`: the model itself, or inside any wrappers."""
    found = {id(module): module for module in _backbones(model)}
    if not found:
        raise UserError(
            f"no anatomy known for {_full_names(_unwrapped(model))[0]}: the places of its attention are not known. "
            f"Known families: {', '.join(sorted(ANATOMIES))}. "
            "Use a model of one of these, or add a row to backbones/anatomy.py."
        )
    if len(found) > 1:
        kinds = ", ".join(type(module).__name__ for module in found.values())
        raise UserError(
            f"the model holds {len(found)} backbones side by side ({kinds}), and only one can be instrumented at a "
            "time. Pass one of them, or nest one block per backbone."
        )
    return next(iter(found.values()))


def family_of(model: nn.Module) -> str:
    """The key of the model's row in `ANATOMIES`."""
    family = _family(backbone_of(model))
    assert family is not None
    return family


def anatomy_of(model: nn.Module) -> Anatomy:
    return ANATOMIES[family_of(model)]


def blocks_of(model: nn.Module) -> list[Part]:
    """Every transformer block, class-attention blocks included, in the order of execution."""
    backbone = backbone_of(model)
    return list(_blocks_in(backbone, "", ANATOMIES[family_of(backbone)].blocks, set()))


def _blocks_in(module: nn.Module, path: str, kinds: Sequence[str], seen: set[int]) -> Iterator[Part]:
    """Blocks inside blocks are not searched: instruments ask before every pass, and most modules are in a block."""
    for name, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        if any(kind.__name__ in kinds for kind in type(child).__mro__):
            yield Part(f"{path}{name}", child)
        else:
            yield from _blocks_in(child, f"{path}{name}.", kinds, seen)


def attentions_of(model: nn.Module) -> list[SoftmaxAttention]:
    """Every module with softmax attention in the order of execution: in blocks, class attention and pooling."""
    backbone = backbone_of(model)
    row, found = ANATOMIES[family_of(backbone)], []
    for name, module in backbone.named_modules():
        seam = next((row.attentions[k.__name__] for k in type(module).__mro__ if k.__name__ in row.attentions), None)
        heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
        if seam is not None and heads is not None:
            channels = type(module).__name__ in row.over_channels
            found.append(SoftmaxAttention(name, module, cast(int, heads), seam, channels))
    for block in blocks_of(backbone):
        if not any(each.name == block.name or each.name.startswith(block.name + ".") for each in found):
            inner = getattr(block.module, "attn", block.module)
            raise UserError(
                f"family '{family_of(backbone)}': block '{block.name}' attends by {type(inner).__name__}, whose score "
                f"seam is not known. Known here: {', '.join(sorted(row.attentions))}. "
                "Add the class to the family's row in backbones/anatomy.py."
            )
    return found


def main_blocks(model: nn.Module) -> list[int]:
    """The numbers of the blocks over patch tokens: all but the class-attention blocks that follow them."""
    return [i for i, block in enumerate(blocks_of(model)) if "ClassAtt" not in type(block.module).__name__]


def main_attentions(model: nn.Module) -> list[int]:
    """The numbers of the attentions inside the main blocks."""
    blocks = blocks_of(model)
    inside = tuple(f"{blocks[number].name}." for number in main_blocks(model))
    return [i for i, part in enumerate(attentions_of(model)) if f"{part.name}.".startswith(inside)]


def prefix_tokens_of(model: nn.Module) -> int:
    """The number of class and register tokens before the patches in the first block."""
    backbone = backbone_of(model)
    prefix = ANATOMIES[family_of(backbone)].prefix
    parts = prefix if isinstance(prefix, tuple) else (prefix,)
    return sum(part if isinstance(part, int) else int(attrgetter(part)(backbone)) for part in parts)


def has_class_token(model: nn.Module) -> bool:
    """Whether the backbone has a class token, wherever it joins."""
    backbone = backbone_of(model)
    *outer, last = ANATOMIES[family_of(backbone)].class_token.split(".")
    home = attrgetter(".".join(outer))(backbone) if outer else backbone
    return getattr(home, last, None) is not None
