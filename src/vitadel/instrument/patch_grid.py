"""The grid of patches that a model cuts an image into, at its first block and at any attention."""

from __future__ import annotations

import math
from typing import Never

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import anatomy_of, backbone_of, blocks_of, family_of, prefix_tokens_of
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, frozen, hooked

__all__ = ["grid_of_keys", "patch_grid"]


class _Reached(Exception):
    """Ends a forward pass at the first block, to save the rest."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(str(shape))
        self.shape = shape


def patch_grid(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Rows and columns of patches for images of the size of `x`, also of wrapped models.

    Only the patch embedding runs, on one image; this does not count as a query. Extra tokens join later.
    """
    row, backbone = anatomy_of(model), backbone_of(model)
    name = row.tokens.enter if row.tokens else blocks_of(model)[0].name
    shape = _shape_at(name, backbone.get_submodule(name), model, x)
    # LeViT's convolutional variant keeps (batch, channels, height, width); everything else has channels last.
    tokens = shape[2:] if getattr(backbone, "use_conv", False) else shape[1:-1]
    count, (height, width) = math.prod(tokens) - prefix_tokens_of(model), x.shape[-2:]
    rows = round(math.sqrt(count * height / width))
    if rows == 0 or count % rows or rows * width != count // rows * height:
        raise UserError(
            f"{count} patch tokens form no grid of squares on images of {height} x {width} pixels. Give images of the "
            "size that the model was built for, or use an attack that needs no patches."
        )
    return rows, count // rows


def grid_of_keys(model: nn.Module, x: Tensor, keys: int) -> tuple[int, int]:
    """Rows and columns of the patches among `keys` keys: those of the first block, or fewer after pooling stages.

    The patches are the last keys, after class, register and extra tokens.
    """
    first = patch_grid(model, x)
    if keys >= math.prod(first):
        return first
    patches, (height, width) = keys - prefix_tokens_of(model), x.shape[-2:]
    rows = round(math.sqrt(max(patches, 0) * height / width))
    if rows == 0 or patches % rows:
        raise UserError(
            f"{patches} keys of family '{family_of(model)}' form no grid over images of {height} x {width} pixels"
        )
    return rows, patches // rows


def _shape_at(name: str, module: nn.Module, model: nn.Module, x: Tensor) -> torch.Size:
    def stop(tokens: Tensor) -> Never:
        raise _Reached(tokens.shape)

    try:
        with frozen(model), torch.no_grad(), hooked(model, [Edge(name, module, stop, before=True)]):
            model(x[:1].detach())
    except _Reached as reached:
        return reached.shape
    raise AssertionError("`hooked` refuses a model that runs without reaching its first block")
