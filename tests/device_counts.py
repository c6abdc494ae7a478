"""Counts what would make the CPU wait for a device: reads of values, and shapes that depend on values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_READS = {aten._local_scalar_dense.default: "item", aten.nonzero.default: "nonzero", aten.equal.default: "equal"}
_READS |= {aten.masked_select.default: "masked_select", aten._unique2.default: "unique"}
_INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class CountsWaits(TorchDispatchMode):
    """Inside the block, `waits` counts `.item()`, `bool(tensor)`, `nonzero`, and indexing by masks."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self.waits[_READS[func]] += 1
        elif func in _INDEXING:
            masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
            self.waits["mask"] += bool(masks)
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.waits.total()
