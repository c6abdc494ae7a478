"""Logits and block features of two versions of each image, which AFAT compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import (
    Part,
    SoftmaxAttention,
    attentions_of,
    backbone_of,
    blocks_of,
    family_of,
    main_attentions,
    main_blocks,
    prefix_tokens_of,
)
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked


@dataclass(frozen=True)
class Pair:
    """Logits of both versions, and features per block as pairs (altered, clean)."""

    altered: Tensor
    clean: Tensor
    features: list[tuple[Tensor, Tensor]]


def pair_of(model: nn.Module, altered: Tensor, clean: Tensor, kind: str, same_paths: bool) -> Pair:
    """Both versions in one forward pass, the altered one first; batch norm sees the statistics of the mixture.

    Features are the outputs of 'blocks' or of the 'attention' inside them. With `same_paths` drop-path drops the same
    paths in both versions of an image, so they differ only by what was altered.
    """
    seen: list[Tensor] = []
    with _recording(model, kind, seen), hooked(model, _same_paths(model) if same_paths else []):
        logits = model(torch.cat([altered, clean]))
    halves = [tuple(each.chunk(2)) for each in seen]
    first, second = logits.chunk(2)
    return Pair(first, second, [(one, other) for one, other in halves])


def pair_with_fewer_tokens(model: nn.Module, x: Tensor, keep: Tensor, count: int, kind: str) -> Pair:
    """The images with all tokens, and without those of the `count` patches not kept; features of the common tokens.

    `keep`, (batch, patches), is 1 or 0 and multiplies the tokens that stay, so that gradients reach it. Two forward
    passes, as the numbers of tokens differ.
    """
    if family_of(model) != "vit":
        raise UserError(
            f"tokens can be dropped from plain ViTs only, and this model is of the family '{family_of(model)}', which "
            "needs all of its tokens in their places; set fill: zero"
        )
    prefix = prefix_tokens_of(model)
    order = keep.detach().argsort(dim=1, descending=True, stable=True)[:, : keep.shape[1] - count]
    patches = order.sort(dim=1).values
    places = torch.cat([torch.arange(prefix, device=x.device).expand(len(x), -1), patches + prefix], 1)[..., None]

    def drop_tokens(tokens: Tensor) -> Tensor:
        if tokens.shape[1] - prefix != keep.shape[1]:
            raise UserError(
                f"fill: drop removes whole tokens, so patches must be the model's own: it has "
                f"{tokens.shape[1] - prefix}, and patches of the given size are {keep.shape[1]}; set patch_size: 0"
            )
        stay = tokens.take_along_dim(places, 1)
        weights = torch.cat([stay.new_ones(len(x), prefix), keep.gather(1, patches).to(stay.dtype)], 1)
        return stay * weights[..., None]

    entrance = "norm_pre"
    whole: list[Tensor] = []
    fewer: list[Tensor] = []
    dropping = Edge(entrance, backbone_of(model).get_submodule(entrance), drop_tokens)
    with _recording(model, kind, fewer), hooked(model, [dropping]):
        altered = model(x)
    with _recording(model, kind, whole):
        clean = model(x)
    return Pair(altered, clean, [(one, all_.take_along_dim(places, 1)) for one, all_ in zip(fewer, whole, strict=True)])


@contextmanager
def _recording(model: nn.Module, kind: str, seen: list[Tensor]) -> Iterator[None]:
    whole, chosen = (attentions_of, main_attentions) if kind == "attention" else (blocks_of, main_blocks)
    parts: Sequence[Part | SoftmaxAttention] = whole(model)
    sites = [Edge(parts[number].name, parts[number].module, seen.append) for number in chosen(model)]
    with hooked(model, sites):
        yield


def _same_paths(model: nn.Module) -> list[Edge]:
    """Treat both versions of an image as one longer sample while drop-path draws its mask."""
    dropping = [
        (name, module)
        for name, module in model.named_modules()
        if any(kind.__name__ == "DropPath" for kind in type(module).__mro__) and getattr(module, "drop_prob", None)
    ]
    return [
        edge
        for name, module in dropping
        for edge in (
            Edge(name, module, lambda x: torch.cat(x.chunk(2), 1), before=True),
            Edge(name, module, lambda x: torch.cat(x.chunk(2, 1))),
        )
    ]
