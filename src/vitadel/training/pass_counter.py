"""Count the images that pass through a model while it is trained, those of attacks included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitadel.backbones.anatomy import blocks_of
from vitadel.errors import UserError


@dataclass
class ImagePasses:
    """Forward passes, most of which have a backward pass; an image that passes twice counts twice."""

    count: int = 0


@contextmanager
def count_image_passes(model: nn.Module) -> Iterator[ImagePasses | None]:
    """Count inside the block, at the first transformer block, which adapters and heads all use; None if it has none."""
    try:
        first = blocks_of(model)[0].module
    except (UserError, IndexError):
        yield None
        return
    passes = ImagePasses()

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tokens: Tensor = inputs[0]
        passes.count += len(tokens)

    handle = first.register_forward_pre_hook(count)
    try:
        yield passes
    finally:
        handle.remove()
