"""Where each adapter of a TORA-ViT is looked at: its gates as pictures over the patches."""

from __future__ import annotations

import torch
from torch import Tensor

from vitadel.adapters.tora.tora import Tora
from vitadel.adapters.tora.tora_fusion import Gates
from vitadel.backbones.anatomy import prefix_tokens_of
from vitadel.errors import UserError, nearest_names
from vitadel.instrument.patch_grid import patch_grid

__all__ = ["ROWS", "gate_maps"]

ROWS = ("mean", "class")
"""Whose gates are drawn: those of all queries together, or those of the class tokens' queries."""


def gate_maps(tora: Tora, x: Tensor, row: str = "mean") -> Tensor:
    """The accuracy adapter's share of what each patch gives to the fusion, (layers, batch, rows, columns), in [0, 1].

    The robustness adapter's is the rest to 1, by construction and whatever was learnt: that the two maps complement
    each other is no finding. With softmax "adapter" this is the mean over `row`'s queries of the gates themselves.
    """
    if row not in ROWS:
        raise UserError(f"unknown row of gates {row!r}{nearest_names(row, ROWS) or '.'} Known: {', '.join(ROWS)}.")
    height, width = patch_grid(tora, x)
    first = prefix_tokens_of(tora)
    with torch.no_grad():
        shares = [_share(gates, row)[:, first : first + height * width] for gates in tora.gates(x)]
    return torch.stack(shares).view(len(shares), len(x), height, width)


def _share(gates: Gates, row: str) -> Tensor:
    """For each key the part of the first adapter, (batch, keys)."""
    if row == "class" and gates.own:
        raise UserError("here class tokens look at themselves only, so that their row is no map. Use row 'mean'.")
    dense = gates.dense()
    chosen = slice(0, gates.classes) if row == "class" else slice(None)
    acc, rob = (each[:, :, chosen].double().mean((1, 2)) for each in (dense.acc, dense.rob))
    share = (acc / (acc + rob)).nan_to_num(0.5)  # a patch that nobody looks at prefers neither adapter
    return share.to(torch.promote_types(gates.acc.dtype, torch.float32))
