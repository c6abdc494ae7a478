"""Where a model looks: the attention of its last layer, laid over the patches of the image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import family_of, prefix_tokens_of
from vitadel.errors import Mistake
from vitadel.instrument.attention import attention_maps
from vitadel.instrument.grid import patch_grid
from vitadel.instrument.hooks import frozen

__all__ = ["gaze"]


def gaze(model: nn.Module, x: Tensor) -> Tensor:
    """(rows, columns): how much the answer's token attends to each patch of one image, a mean over heads; sums to 1.

    The row of the class token (or of the pooling query); a model without either is asked how much all patches attend
    to each, on average. What goes to class, register and extra tokens is left out.
    """
    rows, columns = patch_grid(model, x)
    with frozen(model), torch.no_grad(), attention_maps(model) as maps:
        model(x)
    last, patches = maps[-1], rows * columns
    if len(last) != 1 or last.shape[-1] < patches:
        raise Mistake(
            f"the last attention of family '{family_of(model)}' is not over the {rows} x {columns} patches of the "
            "image, but over windows or a coarser grid"
        )
    heads = last[0].double().mean(0)
    one_asks = len(heads) == 1 or prefix_tokens_of(model) > 0
    over_patches = (heads[0] if one_asks else heads.mean(0))[-patches:]
    return (over_patches / over_patches.sum().clamp(min=1e-30)).view(rows, columns).float().cpu()
