"""Where a model looks: one attention map of it, and that of its last layer laid over the patches of the image."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import SoftmaxAttention, attentions_of, backbone_of, family_of, prefix_tokens_of
from vitadel.errors import UserError
from vitadel.instrument.hooks import Lens, frozen, hooked
from vitadel.instrument.patch_grid import grid_of_keys
from vitadel.instrument.tokens import OwnTokens, own_tokens

__all__ = ["attention_over_patches", "own_part", "watched"]


@contextmanager
def watched(model: nn.Module, attention: SoftmaxAttention) -> Iterator[list[Tensor]]:
    """After `model(x)`, the map of this attention, (batch, heads, queries, keys), alone; all others stay fused."""
    seen: list[Tensor] = []

    def keep(_scores: Tensor, probabilities: Tensor) -> None:
        seen[:] = [probabilities]

    with hooked(model, [Lens(attention, see=keep)]):
        yield seen


def own_part(seen: Tensor, own: OwnTokens) -> Tensor:
    """A map without extra tokens, on both sides; a pooling query, which asks alone, comes after they have left."""
    return seen if seen.shape[2] == 1 else own(own(seen, 2), 3)


def attention_over_patches(model: nn.Module, x: Tensor) -> Tensor:
    """(n, rows, columns): the class token's attention to each patch in the last layer that attends, mean over heads.

    Each map sums to 1: what goes to class, register and extra tokens is left out. Where there is no class token nor a
    pooling query, the mean over the patches that ask. A `UserError` for models of unknown families, and where the last
    maps are over windows or no grid.
    """
    last = attentions_of(model)[-1]
    with frozen(model), torch.no_grad(), watched(model, last) as found, own_tokens(model) as own:
        model(x)
    seen = own_part(found[0], own).float().mean(1)
    if len(seen) != len(x):
        raise UserError(f"the last attention of family '{family_of(model)}' is over windows, not over the whole image")
    grid = grid_of_keys(model, x, seen.shape[2])
    named = seen.shape[1] == 1 or getattr(backbone_of(model), "cls_token", None) is not None
    rows = (seen[:, 0] if named else seen[:, prefix_tokens_of(model) :].mean(1))[:, -math.prod(grid) :]
    over_image: Tensor = (rows / rows.sum(1, keepdim=True).clamp(min=1e-30)).unflatten(1, grid)
    return over_image
