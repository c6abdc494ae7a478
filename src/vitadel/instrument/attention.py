"""Softmax attention: scale its scores, read its maps, hold them constant, measure its saturation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import SoftmaxAttention, attentions_of
from vitadel.backbones.attention_hooks import Factor
from vitadel.errors import UserError
from vitadel.instrument.hooks import AttentionHook, Record, hooked

_Row = float | Tensor | Sequence[float | Tensor]
Factors = float | Tensor | Sequence[_Row]
"""One number, one per attention module, or one per head: (modules, heads), ragged where head counts differ."""


@contextmanager
def scaled_attention(model: nn.Module, factors: Factors, *, backward_only: bool = False) -> Iterator[None]:
    """Multiply pre-softmax scores by factors, as in adaptive attention scaling (Jain & Dutta, CVPR 2024).

    One factor per softmax attention in the order of `backbones.anatomy.attentions_of`, including class attention and
    attention pooling. Tensors are read at every run and may require gradients. What is scaled:

    - the product of queries and keys, but not the position bias or mask added to it (BEiT, Swin, LeViT), so that
      shifted windows stay separate. With RoPE the queries are scaled, which commutes with the rotation;
    - XCiT's cross-covariance and SwinV2's cosines, equivalent to scaling their learned temperatures;
    - CaiT's talking heads after the linear map over heads, i.e. the whole input of the softmax;
    - FAN's attention over tokens, but neither its channel gate nor its class attention;
    - RVT's product before its learned factors, equivalent to scaling after them.

    Fused attention stays on, and a factor of 1 changes no bit. With `backward_only` the outputs are those of the
    original model and only gradients pass through scaled attention; each attention runs twice. Blocks nest: factors
    multiply.
    """
    parts = attentions_of(model)
    scales = _one_per_module(factors, parts)
    hooks = [
        AttentionHook(part, scale, backward_only=backward_only)
        for part, scale in zip(parts, scales, strict=True)
        if scale
    ]
    with hooked(model, hooks):
        yield


@contextmanager
def attention_maps(model: nn.Module) -> Iterator[Record]:
    """Attention probabilities: after `model(x)`, `maps[i]` is (batch, heads, queries, keys), before dropout.

    XCiT's cross-covariance blocks attend over channels: (batch, heads, channels, channels). Swin attends in windows:
    (batch * windows, heads, tokens, tokens). FAN's maps are those of its blocks, without class attention. Maps keep
    their graph if gradients are on. Fused attention, which never forms maps, is off inside the block. A further run
    replaces the maps of the last one.
    """
    parts = attentions_of(model)
    maps = Record("attention maps", [part.name for part in parts])

    with _reading(model, parts, maps, lambda _scores, probabilities: probabilities):
        yield maps


@contextmanager
def constant_attention(model: nn.Module) -> Iterator[None]:
    """Treat every attention map as a constant in the backward pass (PNA, Wei et al., AAAI 2022).

    Outputs do not change, up to rounding: fused attention is off inside the block. The maps of `attention_maps` keep
    their graph. XCiT's maps over channels and CaiT's maps before the mixing over heads are constant, too. With gradient
    checkpointing, call backward inside the block.
    """
    with hooked(model, [AttentionHook(part, edit=Tensor.detach) for part in attentions_of(model)]):
        yield


@contextmanager
def score_statistics(model: nn.Module) -> Iterator[Record]:
    """The gap between the two largest pre-softmax scores of each row (Jain & Dutta 2024, fig. 2).

    `gaps[i]` is (batch, heads, queries), without graph, of the softmax's input: with position bias, mask and any
    factors of `scaled_attention`. In float32 the largest probability of a row rounds to 1 from a gap of 16.6 on, and
    the others to 0 at 103. Rows with a single key have an infinite gap.
    """
    parts = attentions_of(model)
    gaps = Record("score gaps", [part.name for part in parts])

    with _reading(model, parts, gaps, lambda scores, _probabilities: _gap(scores.detach())):
        yield gaps


def _reading(
    model: nn.Module, parts: Sequence[SoftmaxAttention], record: Record, read: Callable[[Tensor, Tensor], Tensor]
) -> AbstractContextManager[None]:
    """Put `read(scores, probabilities)` of every attention into the record."""

    def put(place: int, scores: Tensor, probabilities: Tensor) -> None:
        record.put(place, read(scores, probabilities))

    return hooked(model, [AttentionHook(part, observe=partial(put, place)) for place, part in enumerate(parts)])


def _gap(scores: Tensor) -> Tensor:
    if scores.shape[-1] < 2:
        return scores.new_full(scores.shape[:-1], math.inf)
    largest = scores.topk(2, dim=-1).values
    return largest[..., 0] - largest[..., 1]


def _one_per_module(factors: Factors, parts: Sequence[SoftmaxAttention]) -> list[Factor | None]:
    """A reader of each module's factor; None for the number 1, which changes nothing."""
    if isinstance(factors, Real):
        return [_constant(factors)] * len(parts)
    if isinstance(factors, Tensor) and factors.dim() == 0:
        return [lambda: factors] * len(parts)
    several = cast(Sequence[_Row], factors)
    if len(several) != len(parts):
        raise UserError(
            f"scaled_attention: {len(several)} factors given, but the model has {len(parts)} softmax attentions "
            f"({parts[0].name} ... {parts[-1].name}). Give one number, {len(parts)} numbers, or one row of numbers "
            "per attention with one number per head."
        )
    return [_reader(several, place, part) for place, part in enumerate(parts)]


def _reader(factors: Sequence[_Row], place: int, part: SoftmaxAttention) -> Factor | None:
    factor = factors[place]
    if isinstance(factor, Real):
        return _constant(factor)
    row = cast(Tensor | Sequence[float | Tensor], factor)
    shape = tuple(row.shape) if isinstance(row, Tensor) else (len(row),)
    if shape not in ((), (part.heads,)):
        raise UserError(
            f"scaled_attention: factors of shape {shape} given for '{part.name}', which has {part.heads} heads. "
            f"Give one number or {part.heads} numbers there."
        )
    if isinstance(row, Tensor):
        # Indexed when the module runs: the block may be entered without gradients and used with them.
        return lambda: cast(Tensor, factors[place])
    return lambda: torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in row])


def _constant(factor: Real) -> Factor | None:
    number = float(factor)
    return None if number == 1 else lambda: number
