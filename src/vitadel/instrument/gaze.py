"""Where a model looks: the attention of its last layer, laid over the patches of the image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of, family_of, prefix_tokens_of
from vitadel.errors import Mistake
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.grid import grid_of_keys
from vitadel.instrument.hooks import frozen
from vitadel.instrument.tokens import own_tokens

__all__ = ["attention_over_patches"]


def attention_over_patches(model: nn.Module, x: Tensor) -> Tensor:
    """(n, rows, columns): the class token's attention to each patch in the last layer that attends, mean over heads.

    Each map sums to 1: what goes to class, register and extra tokens is left out. Where there is no class token nor a
    pooling query, the mean over the patches that ask. A `Mistake` for models of unknown families, and where the last
    maps are over windows or no grid.
    """
    with frozen(model), torch.no_grad(), attention_maps(model) as maps, own_tokens(model) as own:
        model(x)
    seen = maps[-1].float().mean(1)
    if len(seen) != len(x):
        raise Mistake(f"the last attention of family '{family_of(model)}' is over windows, not over the whole image")
    one_asks = seen.shape[1] == 1
    if not one_asks:  # a pooling query comes after the extra tokens have left
        seen = own(own(seen), 2)
    grid = grid_of_keys(model, x, seen.shape[2])
    named = one_asks or getattr(backbone_of(model), "cls_token", None) is not None
    rows = (seen[:, 0] if named else seen[:, prefix_tokens_of(model) :].mean(1))[:, -math.prod(grid) :]
    over_image: Tensor = (rows / rows.sum(1, keepdim=True).clamp(min=1e-30)).unflatten(1, grid)
    return over_image
