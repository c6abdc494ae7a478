"""Rows of attention maps: how much one query attends to each patch of the image."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import (
    SoftmaxAttention,
    attentions_of,
    family_of,
    has_class_token,
    main_attentions,
    prefix_tokens_of,
)
from vitadel.errors import UserError
from vitadel.instrument.hooks import AttentionHook, frozen, hooked
from vitadel.instrument.tokens import grid_of_keys, own_tokens

CENTER, CLASS, LAST, ALL = "centre", "class", "last", "all"
_PATCH = re.compile(r"(\d+),(\d+)")


@dataclass(frozen=True)
class AttentionRow:
    """One query of one attention: its row in the map, and the grid of patches that the last keys of the row form."""

    attention: SoftmaxAttention
    row: int
    grid: tuple[int, int]

    @property
    def patches(self) -> int:
        return math.prod(self.grid)


def attention_over_patches(model: nn.Module, x: Tensor) -> Tensor:
    """The class token's attention to each patch in the last attention, mean over heads, as (batch, rows, columns).

    Attention to class, register and extra tokens is left out, and each map is scaled to sum to 1. Models without a
    class token and a pooling query give the mean over all patch queries. Raises `UserError` for unknown families, and
    where the last attention is inside windows or its keys form no grid.
    """
    attention = attentions_of(model)[-1]
    with frozen(model), torch.no_grad(), _own_map(model, attention) as maps:
        model(x)
        seen = maps()
    seen = seen.float().mean(1)
    if len(seen) != len(x):
        raise UserError(f"the last attention of family '{family_of(model)}' is over windows, not over the whole image")
    grid = grid_of_keys(model, x, seen.shape[2])
    has_class = seen.shape[1] == 1 or has_class_token(model)
    rows = seen[:, 0] if has_class else seen[:, prefix_tokens_of(model) :].mean(1)
    return over_patches(AttentionRow(attention, 0, grid), rows)


def check_query(query: str) -> None:
    if query not in (CENTER, CLASS) and _PATCH.fullmatch(query.replace(" ", "")) is None:
        raise UserError(
            f"the query must be {CENTER}, {CLASS}, or a patch as ROW,COL counted from 0, e.g. 3,5; got {query!r}"
        )


def check_block(block: str) -> None:
    if block not in (LAST, ALL) and re.fullmatch(r"-?\d+", block) is None:
        raise UserError(f"the block must be {LAST}, {ALL} or a number (0 is the first, -1 the last), got {block!r}")


def find_rows(model: nn.Module, x: Tensor, query: str, block: str) -> list[AttentionRow]:
    """The rows of `query` in one block, or with 'all' in every attention inside a block."""
    if block != ALL:
        return [find_row(model, x, query, block)]
    return [find_row(model, x, query, str(number)) for number in main_attentions(model)]


def find_row(model: nn.Module, x: Tensor, query: str, block: str) -> AttentionRow:
    """The row of `query` in `block`, for images of the size of `x`; raises `UserError` if the model has no such row."""
    check_query(query)
    check_block(block)
    attention = _find_attention(model, query, block)
    with frozen(model), torch.no_grad(), _own_map(model, attention) as maps:
        model(x[:1])
        batch, _, queries, keys = maps().shape
    family = family_of(model)
    if batch != 1:
        raise UserError(
            f"'{attention.name}' of family '{family}' attends inside windows, so no patch has a row over the whole "
            "image. Take a model with attention over all patches."
        )
    grid = grid_of_keys(model, x, keys)
    if query == CLASS:
        # Registers are no class tokens, and a late class token (class attention) takes no part in the blocks.
        has_class = prefix_tokens_of(model) > 0 and has_class_token(model)
        if queries > 1 and not has_class:
            raise UserError(
                f"'{attention.name}' of family '{family}' has no class token; take --query {CENTER} or ROW,COL"
            )
        return AttentionRow(attention, 0, grid)
    if queries != keys:
        raise UserError(
            f"'{attention.name}' of family '{family}' has {queries} queries for {keys} keys, so patches are not "
            f"queries there. Take --query {CLASS}, or another --block."
        )
    rows, columns = grid
    row, column = (rows // 2, columns // 2) if query == CENTER else map(int, query.split(","))
    if not (row < rows and column < columns):
        raise UserError(
            f"there is no patch {row},{column}: '{attention.name}' has {rows} x {columns} patches, counted from 0"
        )
    return AttentionRow(attention, keys - rows * columns + row * columns + column, grid)


def _find_attention(model: nn.Module, query: str, block: str) -> SoftmaxAttention:
    """`last` is the last one that has the query: for patches the last inside a block, before class attention."""
    attentions = attentions_of(model)
    number = int(block) if block != LAST else -1 if query == CLASS else main_attentions(model)[-1]
    if not -len(attentions) <= number < len(attentions):
        raise UserError(
            f"no attention {number}: the model has {len(attentions)}, in running order. Give a number from "
            f"{-len(attentions)} to {len(attentions) - 1}, or {LAST}."
        )
    chosen = attentions[number]
    if chosen.over_channels:
        raise UserError(
            f"'{chosen.name}' of family '{family_of(model)}' attends over channels, not over patches; only its class "
            f"attention has a map of the image: take --query {CLASS} --block {LAST}"
        )
    return chosen


@torch.no_grad()
def read_several(model: nn.Module, rows: Sequence[AttentionRow], x: Tensor) -> list[Tensor]:
    """The query's attention to all tokens, (batch, heads, keys), in each of several attentions, by one forward pass."""
    with ExitStack() as stack:
        maps = [stack.enter_context(_own_map(model, row.attention)) for row in rows]
        model(x)
        return [own()[:, :, row.row].float() for row, own in zip(rows, maps, strict=True)]


def over_patches(row: AttentionRow, rows: Tensor) -> Tensor:
    """The part of `rows` (..., keys) that goes to patches, as maps (..., rows, columns) that each sum to 1."""
    patches = rows[..., -row.patches :]
    maps: Tensor = (patches / patches.sum(-1, keepdim=True).clamp(min=1e-30)).unflatten(-1, row.grid)
    return maps


@contextmanager
def _own_map(model: nn.Module, attention: SoftmaxAttention) -> Iterator[Callable[[], Tensor]]:
    """After `model(x)`, a reader of this attention's map (batch, heads, queries, keys) without extra tokens.

    Only this attention runs unfused. A pooling query runs after extra tokens were dropped.
    """
    seen: list[Tensor] = []

    def keep(_scores: Tensor, probabilities: Tensor) -> None:
        seen[:] = [probabilities]

    with hooked(model, [AttentionHook(attention, observe=keep)]), own_tokens(model) as own:
        yield lambda: seen[0] if seen[0].shape[2] == 1 else own(own(seen[0], 2), 3)
