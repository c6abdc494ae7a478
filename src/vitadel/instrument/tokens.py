"""Run a model with extra prefix tokens, as robustness tokens do (Pulfer et al., ECCV 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import (
    ANATOMIES,
    TokenSeam,
    anatomy_of,
    attentions_of,
    backbone_of,
    family_of,
    prefix_tokens_of,
)
from vitadel.errors import Mistake
from vitadel.instrument.hooks import Edge, Lens, hooked

__all__ = ["extra_tokens"]


@contextmanager
def extra_tokens(model: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Insert `tokens`, (R, dim) or (1, R, dim), before the first block and drop them after the last.

    They stand after the class and register tokens and get no position: they join after position embedding and
    `norm_pre`, and with RoPE they stay unrotated while every patch keeps its own rotation. They are dropped before the
    final norm, so pooling and head see what they always see. Tokens may require gradients. No tokens change no bit.
    """
    seam = _seam(model)
    backbone = backbone_of(model)
    extra = _checked(tokens, int(getattr(backbone, seam.width)))
    count, first = extra.shape[1], prefix_tokens_of(model)
    if count == 0:
        yield
        return

    def insert(x: Tensor) -> Tensor:
        return torch.cat([x[:, :first], extra.to(x).expand(len(x), -1, -1), x[:, first:]], dim=1)

    def drop(x: Tensor) -> Tensor:
        return torch.cat([x[:, :first], x[:, first + count :]], dim=1)

    rotating = [part for part in attentions_of(model) if hasattr(part.module, "num_prefix_tokens")]
    sites: list[Edge | Lens] = [
        Edge(seam.enter, backbone.get_submodule(seam.enter), insert),
        Edge(seam.leave, backbone.get_submodule(seam.leave), drop, before=True),
        *(Lens(part, more_prefix=count) for part in rotating),
    ]
    with hooked(model, sites):
        yield


def _seam(model: nn.Module) -> TokenSeam:
    row = anatomy_of(model)
    if row.tokens is None:
        able = ", ".join(sorted(family for family, each in ANATOMIES.items() if each.tokens))
        raise Mistake(
            f"extra tokens have no meaning for family '{family_of(model)}': {row.no_tokens}. "
            f"Families that take them: {able}."
        )
    return row.tokens


def _checked(tokens: Tensor, width: int) -> Tensor:
    """As (1, R, width)."""
    whole = tokens[None] if tokens.dim() == 2 else tokens
    if whole.dim() != 3 or whole.shape[0] != 1 or whole.shape[2] != width:
        raise Mistake(
            f"extra_tokens: tokens of shape {tuple(tokens.shape)} given; the model takes (R, {width}) or "
            f"(1, R, {width}), the same tokens for every image."
        )
    return whole
