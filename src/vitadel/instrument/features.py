"""Read the residual stream after each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of, blocks_of
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, Record, hooked

__all__ = ["block_features", "token_sequence"]


@contextmanager
def block_features(model: nn.Module, indices: Sequence[int] | None = None) -> Iterator[Record]:
    """Outputs of the transformer blocks: after `model(x)`, `features[i]` is what block `indices[i]` returned.

    Blocks are numbered in running order, including class-attention blocks (except FAN's); negative numbers count from
    the end, None means all. Shapes depend on the family: (batch, tokens, dim), in Swin (batch, height, width, dim), in
    CaiT's class-attention blocks only the class token. Extra tokens are included, after class and register tokens.
    Features keep their graph if gradients are on. A further run replaces those of the last one.
    """
    blocks = blocks_of(model)
    wanted = range(len(blocks)) if indices is None else indices
    wrong = [index for index in wanted if not -len(blocks) <= index < len(blocks)]
    if wrong:
        raise UserError(
            f"block_features: no block {', '.join(map(str, wrong))}; the model has {len(blocks)} blocks. "
            f"Give numbers from {-len(blocks)} to {len(blocks) - 1}, or None for all."
        )
    chosen = [blocks[index] for index in wanted]
    features = Record("block features", [block.name for block in chosen])

    sites = [Edge(block.name, block.module, partial(features.put, place)) for place, block in enumerate(chosen)]
    with hooked(model, sites):
        yield features


def token_sequence(model: nn.Module, features: Tensor) -> Tensor:
    """A block's output as (batch, tokens, channels), whatever shape the family gives it."""
    if features.dim() != 4:
        return features
    # LeViT's convolutional variant has channels first, Swin has them last.
    channels_first = getattr(backbone_of(model), "use_conv", False)
    return features.flatten(2).mT if channels_first else features.flatten(1, 2)
