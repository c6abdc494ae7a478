"""Where one token looks: a row of one attention map, chosen by block and query, for every family that has such rows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.patches.corruption_model import main_attentions
from vitadel.backbones.anatomy import SoftmaxAttention, attentions_of, backbone_of, family_of, prefix_tokens_of
from vitadel.errors import UserError
from vitadel.instrument.attention_rows import own_part, watched
from vitadel.instrument.hooks import frozen
from vitadel.instrument.patch_grid import grid_of_keys
from vitadel.instrument.tokens import own_tokens

__all__ = ["CENTRE", "CLASS", "LAST", "AttentionRows", "check_block", "check_query", "gaze_of", "rows_of", "seen_rows"]

CENTRE, CLASS, LAST = "centre", "class", "last"
_PLACE = re.compile(r"(\d+),(\d+)")


@dataclass(frozen=True)
class AttentionRows:
    """One query of one attention: its row of the map, and the grid of patches that the last keys of the row are."""

    attention: SoftmaxAttention
    row: int
    grid: tuple[int, int]

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]


def check_query(query: str) -> None:
    if query not in (CENTRE, CLASS) and _PLACE.fullmatch(query.replace(" ", "")) is None:
        raise UserError(
            f"the query is {CENTRE}, {CLASS}, or a patch as ROW,COL counted from 0, e.g. 3,5; got {query!r}"
        )


def check_block(block: str) -> None:
    if block != LAST and re.fullmatch(r"-?\d+", block) is None:
        raise UserError(f"the block is {LAST} or a number (0 is the first, -1 the last), got {block!r}")


def gaze_of(model: nn.Module, x: Tensor, query: str, block: str) -> AttentionRows:
    """The row that the words name, for images like `x`; a model without it is told so, with what to ask instead."""
    check_query(query)
    check_block(block)
    attention = _attention(model, query, block)
    with frozen(model), torch.no_grad(), watched(model, attention) as seen, own_tokens(model) as own:
        model(x[:1])
    (batch, _, queries, keys), family = own_part(seen[0], own).shape, family_of(model)
    if batch != 1:
        raise UserError(
            f"'{attention.name}' of family '{family}' attends inside windows, so no patch has a row over the whole "
            "image. Take a model with attention over all patches."
        )
    rows, columns, patches = *(grid := grid_of_keys(model, x, keys)), math.prod(grid)
    if query == CLASS:
        # A register is none, and where the class token comes late it takes no part in the blocks.
        named = prefix_tokens_of(model) > 0 and getattr(backbone_of(model), "cls_token", None) is not None
        if queries > 1 and not named:
            raise UserError(
                f"'{attention.name}' of family '{family}' has no class token to ask; take --query {CENTRE} or ROW,COL"
            )
        return AttentionRows(attention, 0, grid)
    if queries != keys:
        raise UserError(
            f"'{attention.name}' of family '{family}' has {queries} queries for {keys} keys, so patches do not ask "
            f"there. Take --query {CLASS}, or another --block."
        )
    row, column = (rows // 2, columns // 2) if query == CENTRE else map(int, query.split(","))
    if not (row < rows and column < columns):
        raise UserError(
            f"there is no patch {row},{column}: '{attention.name}' sees {rows} x {columns} patches, counted from 0"
        )
    return AttentionRows(attention, keys - patches + row * columns + column, grid)


def _attention(model: nn.Module, query: str, block: str) -> SoftmaxAttention:
    """`last` is the last that the query takes part in: for patches, one inside a block, before class attention."""
    every = attentions_of(model)
    number = int(block) if block != LAST else -1 if query == CLASS else main_attentions(model)[-1]
    if not -len(every) <= number < len(every):
        raise UserError(
            f"no attention {number}: the model has {len(every)}, in running order. Give a number from {-len(every)} "
            f"to {len(every) - 1}, or {LAST}."
        )
    chosen = every[number]
    if type(chosen.module).__name__ == "XCA":
        raise UserError(
            f"'{chosen.name}' of family 'xcit' attends over channels, not over patches; only its class attention has a "
            f"map of the image: take --query {CLASS} --block {LAST}"
        )
    return chosen


@torch.no_grad()
def seen_rows(model: nn.Module, gaze: AttentionRows, x: Tensor) -> Tensor:
    """(images, heads, keys): the query's attention to all tokens."""
    with watched(model, gaze.attention) as seen, own_tokens(model) as own:
        model(x)
    return own_part(seen[0], own)[:, :, gaze.row].float()


def rows_of(gaze: AttentionRows, rows: Tensor) -> Tensor:
    """The part that goes to patches as maps over the image, (images, heads, rows, columns), each summing to 1."""
    over_patches = rows[..., -gaze.patches :]
    maps: Tensor = (over_patches / over_patches.sum(-1, keepdim=True).clamp(min=1e-30)).unflatten(-1, gaze.grid)
    return maps
