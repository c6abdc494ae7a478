"""Read the residual stream after each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of, blocks_of
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, Record, hooked

__all__ = ["block_features", "token_sequence"]


@contextmanager
def block_features(model: nn.Module, indices: Sequence[int] | None = None) -> Iterator[Record]:
    """Outputs of the transformer blocks: after `model(x)`, `features[i]` is what block `indices[i]` returned.

    Blocks are numbered in running order, class-attention blocks included (FAN's are not: its blocks are those that see
    patch tokens alone); negative numbers count from the end, and None means all. Shapes are as the family makes them:
    (batch, tokens, dim), for Swin (batch, height, width, dim), for CaiT's class-attention blocks the class token alone.
    Tokens of `extra_tokens` are there, after the class and register tokens. Features carry their graph when gradients
    are on. A further run replaces those of the last.
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

    def keep(place: int) -> Callable[[Tensor], None]:
        return lambda output: features.put(place, output)

    with hooked(model, [Edge(block.name, block.module, keep(place)) for place, block in enumerate(chosen)]):
        yield features


def token_sequence(model: nn.Module, features: Tensor) -> Tensor:
    """A block's output as (batch, tokens, channels), whatever shape the family gives it."""
    if features.dim() != 4:
        return features
    # LeViT's convolutional variant has channels first, Swin has them last.
    channels_first = getattr(backbone_of(model), "use_conv", False)
    return features.flatten(2).mT if channels_first else features.flatten(1, 2)
