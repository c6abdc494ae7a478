"""Which kernel computes attention: torch's fused one, except where taking its parts one by one is faster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["fastest_attention"]


@contextmanager
def fastest_attention(model: nn.Module, device: torch.device, kind: torch.dtype | None) -> Iterator[None]:
    """Inside the block `model` computes attention by what is fastest on this device in this half precision (or None).

    On a processor the fused kernel's backward pass in bf16 takes nearly three times as long as its parts do, so that
    bf16 would be slower than float32 instead of twice as fast (65 tokens, three heads of 32).
    """
    apart = [
        module
        for module in model.modules()
        if kind is not None and device.type == "cpu" and getattr(module, "fused_attn", False)
    ]
    try:
        for module in apart:
            module.fused_attn = False  # type: ignore[assignment]
        yield
    finally:
        for module in apart:
            module.fused_attn = True  # type: ignore[assignment]
