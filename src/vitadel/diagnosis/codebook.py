"""Attention that hides pixels: every pixel looks up its shade in a book, and only the score knows which pixel asked.

In the blocks of a transformer saturated attention still passes gradients, by the values of the tokens that it picks:
with queries 100,000 times larger, PGD breaks the standard model of the zoo as before. Here the values are fixed, so
that pixels reach the model through the softmax alone. With sharp scores that is rounding to so many shades, with a
gradient that is true, and zero to the last bit for nearly all pixels.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of

__all__ = ["Attention", "looking_up"]


class Attention(nn.Module):
    """Named after what the anatomy of ViTs lists as softmax attention, so that every instrument finds it.

    Pixels from -1 to 1 are the queries, shades are keys and values. A pixel on a shade has a score of `gap` above those
    of the next ones.
    """

    num_heads = 1

    def __init__(self, shades: int, gap: float) -> None:
        super().__init__()
        book = torch.linspace(-1, 1, shades)
        self.sharpness = gap / float(book[1] - book[0]) ** 2
        # How close a pixel is to a shade, -(pixel - shade)^2, but for the pixel's square, which is the same for all.
        self.register_buffer("keys", torch.stack([2 * book, -book.square()])[None, None])
        self.register_buffer("values", book[None, None, :, None])

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(1)
        queries = self.sharpness * torch.stack([pixels, torch.ones_like(pixels)], 2)[:, None]
        looked_up = (queries @ self.get_buffer("keys")).softmax(-1) @ self.get_buffer("values")
        return looked_up.view_as(x)


def looking_up(model: nn.Module, shades: int, gap: float) -> nn.Module:
    """A copy of a ViT that normalises to [-1, 1], whose patches are made of the shades that its pixels look up."""
    broken_defense = copy.deepcopy(model)
    embedding: Any = backbone_of(broken_defense).patch_embed
    embedding.book = Attention(shades, gap).train(embedding.training)
    embedding.register_forward_pre_hook(lambda module, args: (module.book(args[0]), *args[1:]))
    return broken_defense
