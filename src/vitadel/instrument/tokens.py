"""Tokens of a ViT: extra tokens as in Robustness Tokens (Pulfer et al., ECCV 2024), and the grid of patch tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Never
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import (
    ANATOMIES,
    TokenSeam,
    anatomy_of,
    attentions_of,
    backbone_of,
    blocks_of,
    family_of,
    prefix_tokens_of,
)
from vitadel.errors import UserError, check_known
from vitadel.instrument.hooks import AttentionHook, Edge, frozen, hooked

PLACEMENTS = ("prefix", "append")
"""After the class and register tokens, or at the end of the sequence."""


@dataclass(frozen=True, eq=False)
class _Span:
    """The numbers of tokens that one `extra_tokens` block inserted after the prefix and at the end.

    An equal share of them joins before each of the blocks `layers`.
    """

    before: int
    behind: int
    layers: tuple[int, ...] = (0,)

    def at(self, block: int) -> _Span:
        """Those that go through a block."""
        joined = sum(layer <= block for layer in self.layers)
        before, behind = (number * joined // len(self.layers) for number in (self.before, self.behind))
        return _Span(before, behind)


_PRESENT: WeakKeyDictionary[nn.Module, list[_Span]] = WeakKeyDictionary()  # by backbone, while the blocks last


@contextmanager
def extra_tokens(
    model: nn.Module, tokens: Tensor, *, placement: str = "prefix", layers: Sequence[int] = (0,)
) -> Iterator[None]:
    """Insert tokens before the first block and drop them after the last: (R, dim), or (batch, R, dim) per image.

    With other `layers`, block numbers, an equal share of the tokens joins before each of these blocks, in order.

    They follow the class and register tokens and have no position: they are inserted after position embedding and
    `norm_pre`, and RoPE does not rotate them. They are dropped before the final norm, so pooling and head do not see
    them. Tokens may require gradients. With zero tokens no bit changes.

    With `placement` "append" they come last, as in the released code. Attention does not depend on the order, so only
    rounding differs; models with RoPE do not support it.
    """
    seam, backbone = _seam(model), backbone_of(model)
    check_placement(model, placement)
    extra = _checked(tokens, token_width(model))
    count, first = extra.shape[1], prefix_tokens_of(model)
    if count == 0:
        yield
        return
    places = check_layers(model, layers, count)
    span = _Span(count, 0, places) if placement == "prefix" else _Span(0, count, places)

    def insert(share: Tensor, x: Tensor) -> Tensor:
        own = _for_each(share, x)
        return torch.cat([x, own] if span.behind else [x[:, :first], own, x[:, first:]], dim=1)

    def drop(x: Tensor) -> Tensor:
        return _without(x, 1, first, span)

    blocks = blocks_of(model)
    rotating = [part for part in attentions_of(model) if hasattr(part.module, "num_prefix_tokens")]
    sites: list[Edge | AttentionHook] = [
        Edge(seam.leave, backbone.get_submodule(seam.leave), drop, before=True),
        *(AttentionHook(part, extra_prefix=span.at(block).before) for block, part in enumerate(rotating)),
    ]
    for layer, share in zip(places, extra.chunk(len(places), dim=1), strict=True):
        if layer == 0:
            sites.append(Edge(seam.enter, backbone.get_submodule(seam.enter), partial(insert, share)))
        else:
            sites.append(Edge(blocks[layer].name, blocks[layer].module, partial(insert, share), before=True))
    present = _PRESENT.setdefault(backbone, [])
    with hooked(model, sites):
        present.append(span)
        try:
            yield
        finally:
            present.remove(span)


class OwnTokens:
    """Removes from a block's output the tokens that `extra_tokens` inserted in the last run."""

    def __init__(self, first: int, blocks: int) -> None:
        self._first = first
        self._blocks = blocks
        self._tokens = 0
        self._by_number: dict[int, _Span] = {0: _Span(0, 0)}

    def record(self, output: Tensor, spans: list[_Span]) -> None:
        """Take in the output of the first block, and what is inserted in this run."""
        if not spans:
            self._by_number = {0: _Span(0, 0)}
            return
        present = [_total([span.at(block) for span in spans]) for block in range(self._blocks)]
        # Both numbers grow from block to block, so equal sums are equal pairs.
        self._by_number = {each.before + each.behind: each for each in present}
        self._tokens = output.shape[1] - present[0].before - present[0].behind

    @property
    def extra(self) -> int:
        """The number of these tokens in the last block."""
        return next(reversed(self._by_number))

    def fits(self, length: int, tokens: int) -> bool:
        """Whether a sequence of this length, in some block, is `tokens` of the model and extra ones."""
        return length - tokens in self._by_number

    def __call__(self, values: Tensor, dim: int = 1) -> Tensor:
        """`values` without the entries of extra tokens along `dim`."""
        here = self._by_number.get(values.shape[dim] - self._tokens, self._by_number[self.extra])
        return _without(values, dim, self._first, here)


@contextmanager
def own_tokens(model: nn.Module) -> Iterator[OwnTokens]:
    """After `model(x)`, `own(features)` are a block's features without extra tokens.

    The tokens may come from an `extra_tokens` block around this one, or from a module inside the model.
    """
    backbone, blocks = backbone_of(model), blocks_of(model)
    own, first = OwnTokens(prefix_tokens_of(model), len(blocks)), blocks[0]

    def record(output: Tensor) -> None:
        own.record(output, _PRESENT.get(backbone, []))

    with hooked(model, [Edge(first.name, first.module, record)]):
        yield own


def token_width(model: nn.Module) -> int:
    """The width of extra tokens; raises `UserError` for models that cannot have them."""
    seam = _seam(model)
    return int(attrgetter(seam.width)(backbone_of(model)))


def check_placement(model: nn.Module, placement: str) -> None:
    """Refuse an unknown placement, and one that this model would confuse with patches."""
    check_known("placement of tokens", placement, PLACEMENTS)
    if placement == "append" and getattr(backbone_of(model), "rope", None) is not None:
        raise UserError(
            f"extra tokens cannot be appended to {type(backbone_of(model)).__name__}: it rotates what follows its "
            "class and register tokens by position (RoPE), so patches would get wrong rotations. Use placement "
            "'prefix', which is the same for models without rotation."
        )


def check_layers(model: nn.Module, layers: Sequence[int], count: int) -> tuple[int, ...]:
    """The numbers of blocks as a tuple; refuse those that are not there, and `count` tokens that they cannot share."""
    there = len(blocks_of(model))
    if not layers or sorted(set(layers)) != list(layers) or layers[0] < 0 or layers[-1] >= there:
        raise UserError(
            f"layers of tokens are numbers of blocks in rising order, from 0 to {there - 1} in this model; got "
            f"{list(layers)}"
        )
    if count % len(layers):
        raise UserError(
            f"{count} tokens cannot be shared equally by {len(layers)} layers, {list(layers)}; give a multiple of "
            f"{len(layers)}"
        )
    return tuple(layers)


def _total(spans: list[_Span]) -> _Span:
    return _Span(sum(span.before for span in spans), sum(span.behind for span in spans))


def _seam(model: nn.Module) -> TokenSeam:
    able = ", ".join(sorted(family for family, each in ANATOMIES.items() if each.tokens))
    takers = f"Families that take them: {able}."
    try:
        row = anatomy_of(model)
    except UserError as mistake:  # it lists the known families, not those that take tokens
        raise UserError(f"no place is known for extra tokens: {mistake} {takers}") from mistake
    if row.tokens is None:
        raise UserError(f"extra tokens have no meaning for family '{family_of(model)}': {row.no_tokens}. {takers}")
    return row.tokens


def _checked(tokens: Tensor, width: int) -> Tensor:
    """The tokens as (1 or batch, R, width)."""
    whole = tokens[None] if tokens.dim() == 2 else tokens
    if whole.dim() != 3 or whole.shape[2] != width:
        raise UserError(
            f"extra_tokens: tokens of shape {tuple(tokens.shape)} given; the model takes (R, {width}) or "
            f"(1, R, {width}), the same tokens for every image, or (batch, R, {width})."
        )
    return whole


def _for_each(extra: Tensor, x: Tensor) -> Tensor:
    """One set of tokens per image, in the type of `x`."""
    if len(extra) not in (1, len(x)):
        raise UserError(
            f"extra_tokens: {len(extra)} sets of tokens given for {len(x)} images; give one set for all, or one each."
        )
    return extra.to(x).expand(len(x), -1, -1)


def _without(values: Tensor, dim: int, first: int, span: _Span) -> Tensor:
    rest = values.narrow(dim, 0, values.shape[dim] - span.behind) if span.behind else values
    if not span.before:
        return rest
    start = first + span.before
    return torch.cat([rest.narrow(dim, 0, first), rest.narrow(dim, start, rest.shape[dim] - start)], dim=dim)


class _Reached(Exception):
    """Ends a forward pass at the first block, to save the rest."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(str(shape))
        self.shape = shape


def patch_grid(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Rows and columns of patches for images of the size of `x`, also of wrapped models.

    Only the patch embedding runs, on one image; this does not count as a query. Extra tokens join later.
    """
    row, backbone = anatomy_of(model), backbone_of(model)
    if row.tokens:  # what it returns, before extra tokens join
        name = row.tokens.enter
        shape = _shape_at(Edge(name, backbone.get_submodule(name), _stop, first=True), model, x)
    else:
        block = blocks_of(model)[0]
        shape = _shape_at(Edge(block.name, block.module, _stop, before=True), model, x)
    # LeViT's convolutional variant keeps (batch, channels, height, width); everything else has channels last.
    tokens = shape[2:] if getattr(backbone, "use_conv", False) else shape[1:-1]
    count, (height, width) = math.prod(tokens) - prefix_tokens_of(model), x.shape[-2:]
    rows = round(math.sqrt(count * height / width))
    if rows == 0 or count % rows or rows * width != count // rows * height:
        raise UserError(
            f"{count} patch tokens form no grid of squares on images of {height} x {width} pixels. Give images of the "
            "size that the model was built for, or use an attack that needs no patches."
        )
    return rows, count // rows


def grid_of_keys(model: nn.Module, x: Tensor, keys: int) -> tuple[int, int]:
    """Rows and columns of the patches among `keys` keys: those of the first block, or fewer after pooling stages.

    The patches are the last keys, after class, register and extra tokens.
    """
    first = patch_grid(model, x)
    if keys >= math.prod(first):
        return first
    patches, (height, width) = keys - prefix_tokens_of(model), x.shape[-2:]
    rows = round(math.sqrt(max(patches, 0) * height / width))
    if rows == 0 or patches % rows:
        raise UserError(
            f"{patches} keys of family '{family_of(model)}' form no grid over images of {height} x {width} pixels"
        )
    return rows, patches // rows


def _stop(tokens: Tensor) -> Never:
    raise _Reached(tokens.shape)


def _shape_at(edge: Edge, model: nn.Module, x: Tensor) -> torch.Size:
    try:
        with frozen(model), torch.no_grad(), hooked(model, [edge]):
            model(x[:1].detach())
    except _Reached as reached:
        return reached.shape
    raise AssertionError("`hooked` refuses a model that runs without reaching its first block")
