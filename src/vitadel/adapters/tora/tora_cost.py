"""What TORA and its baselines cost: parameters, and multiply-accumulates of one image (the "FLOPs" of the paper)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from vitadel.adapters.tora.tora import Tora
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.backbones.anatomy import attentions_of

__all__ = ["Macs", "Shape", "count_parameters", "macs_of", "multiply_accumulates", "plain_shape", "shape_of"]

_NORM = 5  # operations per number in a layer norm, the usual convention of counters


@dataclass(frozen=True)
class Shape:
    """What the cost of a ViT depends on. `prefix` are class and register tokens, `pixels` the numbers in a patch.

    `weights` are all those of linear layers in blocks, `attentions` the attention layers, `norms` the norms in blocks.
    """

    width: int
    depth: int
    patches: int
    classes: int
    prefix: int
    pixels: int
    weights: int
    attentions: int
    norms: int


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates by where they are spent; `norms` are operations, and beside all else hardly count."""

    embedding: int
    blocks: int
    attention: int
    norms: int
    heads: int
    adapters: int = 0
    projections: int = 0
    products: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        return f"{self.total / 1e9:.1f} GMACs"


def plain_shape(width: int, depth: int, patches: int, classes: int, patch_size: int = 16) -> Shape:
    """A usual ViT: colour images, a class token, MLPs four times as wide as the model."""
    return Shape(
        width=width,
        depth=depth,
        patches=patches,
        classes=classes,
        prefix=1,
        pixels=3 * patch_size**2,
        weights=12 * width**2 * depth,
        attentions=depth,
        norms=2 * depth,
    )


def shape_of(tora: Tora) -> Shape:
    """Of the model that TORA is on, for images of the size that it was built for."""
    backbone: Any = tora.classifier.backbone
    inside = list(backbone.blocks.modules())
    return Shape(
        width=backbone.embed_dim,
        depth=len(backbone.blocks),
        patches=backbone.patch_embed.num_patches,
        classes=tora.num_classes,
        prefix=backbone.num_prefix_tokens,
        pixels=backbone.patch_embed.proj.weight[0].numel(),
        weights=sum(each.weight.numel() for each in inside if isinstance(each, nn.Linear)),
        attentions=len(attentions_of(backbone)),
        norms=sum(isinstance(each, nn.LayerNorm) and each.normalized_shape == (backbone.embed_dim,) for each in inside),
    )


def multiply_accumulates(shape: Shape, settings: ToraSettings | None = None) -> Macs:
    """The cost of one image, as the paper counts: what is computed token by token beside products counts as free."""
    settings = ToraSettings() if settings is None else settings
    width, tokens = shape.width, shape.prefix + shape.patches
    inside = tokens + (settings.slot == "separate")  # tokens in blocks, and queries of the fusion
    adapters = shape.depth * {"head": 0, "single": 1}.get(settings.kind, 2)
    layers = shape.depth if settings.fuses else 0
    bottleneck = width // settings.reduction
    return Macs(
        embedding=shape.patches * shape.pixels * width,
        blocks=inside * shape.weights,
        attention=2 * inside**2 * width * shape.attentions,
        norms=_NORM * width * (inside * shape.norms + tokens * (1 + adapters)),
        heads=len(settings.branches) * width * shape.classes,
        adapters=adapters * tokens * 2 * width * bottleneck,
        projections=layers * (inside + 4 * tokens) * width**2,  # queries once; keys and values of both adapters
        products=layers * width * inside * _per_query(settings, tokens),
    )


def macs_of(tora: Tora) -> Macs:
    return multiply_accumulates(shape_of(tora), tora.settings)


def count_parameters(tora: Tora, *, trained: bool = False, count_unused_head: bool = False) -> int:
    """All parameters that have a part in the answer, or only the `trained` ones.

    The paper also counts the classifier's own head, which TORA leaves unused: `count_unused_head`.
    """
    if trained:
        return sum(each.numel() for each in tora.parameters() if each.requires_grad)
    head: Any = tora.classifier.backbone.head
    unused = 0 if count_unused_head else sum(each.numel() for each in head.parameters())
    return sum(each.numel() for each in tora.parameters()) - unused


def _per_query(settings: ToraSettings, keys: int) -> int:
    """Scores and weighted values, in products of two vectors: the sigmoid form takes one product of matrices less."""
    if settings.kind == "adapterfusion" or settings.softmax == "adapterfusion":
        return 4
    return (3 if settings.softmax == "adapter" else 4) * keys
