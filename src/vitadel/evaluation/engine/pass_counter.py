"""Counts the forward and backward passes of an attack, in samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Cost", "count_passes"]


@dataclass
class Cost:
    """`gradients` counts forward-and-backward pairs, `forwards` the passes without a backward; both in samples."""

    gradients: int = 0
    forwards: int = 0


@contextmanager
def count_passes(model: nn.Module) -> Iterator[Cost]:
    """Count the passes of `model` inside the block, by hooks that are removed afterwards."""
    cost = Cost()

    def count(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        samples = len(inputs[0]) if inputs else len(output)  # an instrumented model may return several rows for each
        cost.forwards += samples
        if output.requires_grad:
            seen = False  # several backwards may follow one forward, as in a Jacobian

            def backward_ran(grad: Tensor) -> None:
                nonlocal seen
                cost.gradients += samples
                cost.forwards -= 0 if seen else samples
                seen = True

            output.register_hook(backward_ran)

    handle = model.register_forward_hook(count)
    try:
        yield cost
    finally:
        handle.remove()
