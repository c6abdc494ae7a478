"""Scale the scores of every softmax attention, see its maps or hold them constant, measure how saturated it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import SoftmaxAttention, attentions_of
from vitadel.backbones.attention_hooks import Factor
from vitadel.errors import UserError
from vitadel.instrument.hooks import AttentionHook, Record, hooked

__all__ = ["Factors", "attention_maps", "constant_attention", "scaled_attention", "score_statistics"]

_Row = float | Tensor | Sequence[float | Tensor]
Factors = float | Tensor | Sequence[_Row]
"""One number, one per attention module, or one per head: (modules, heads), ragged where head counts differ."""


@contextmanager
def scaled_attention(model: nn.Module, factors: Factors, *, backward_only: bool = False) -> Iterator[None]:
    """Multiply pre-softmax scores by factors, as in adaptive attention scaling (Jain & Dutta, CVPR 2024).

    One factor per softmax attention in the order of `backbones.anatomy.attentions_of`: class-attention and
    attention-pooling modules count. Tensors are read anew at every run and may require gradients. What is scaled:

    - the product of queries and keys, and neither the position bias nor the mask that are added to it (BEiT, Swin,
      LeViT), so that shifted windows stay apart. With RoPE the queries are scaled: rotation commutes with it;
    - XCiT's cross-covariance and SwinV2's cosines, which is the same as scaling their learned temperatures;
    - CaiT's talking heads after the linear map over heads: all that the softmax is given;
    - FAN's attention over tokens only, neither its gate of channels nor its class attention;
    - RVT's product before its learned factors multiply it, which is the same as after.

    Fused attention stays on, and a factor of 1 changes no bit. With `backward_only` the outputs are those of the
    untouched model and only gradients pass through attention as if it were scaled; each attention runs twice.
    Blocks nest: factors multiply.
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
    (batch * windows, heads, tokens, tokens). FAN's are those of its blocks, without class attention. Maps carry their
    graph when gradients are on. Fused attention, which never forms them, is off while the modules run inside the block.
    A further run replaces the maps of the last.
    """
    parts = attentions_of(model)
    maps = Record("attention maps", [part.name for part in parts])

    def keep(place: int) -> Callable[[Tensor, Tensor], None]:
        return lambda _scores, probabilities: maps.put(place, probabilities)

    with hooked(model, [AttentionHook(part, observe=keep(place)) for place, part in enumerate(parts)]):
        yield maps


@contextmanager
def constant_attention(model: nn.Module) -> Iterator[None]:
    """Gradients take every attention map for a constant and pass through the values only (PNA, Wei et al., AAAI 2022).

    Outputs stay what they are, up to the rounding between fused attention, which is off inside the block, and the
    manual one. Maps that `attention_maps` shows keep their graph. XCiT's maps over channels and CaiT's, before they are
    mixed over heads, are held as well. Call backward inside the block if the model checkpoints its gradients.
    """
    with hooked(model, [AttentionHook(part, edit=Tensor.detach) for part in attentions_of(model)]):
        yield


@contextmanager
def score_statistics(model: nn.Module) -> Iterator[Record]:
    """How far the largest pre-softmax score of each row lies above the second largest (Jain & Dutta 2024, fig. 2).

    `gaps[i]` is (batch, heads, queries), without graph: the scores as the softmax takes them, with position bias, mask
    and any factors of `scaled_attention`. In float32 a row's largest probability rounds to 1 from a gap of 16.6 on,
    and the others vanish entirely at 103. Rows with a single key have an infinite gap.
    """
    parts = attentions_of(model)
    gaps = Record("score gaps", [part.name for part in parts])

    def measure(place: int) -> Callable[[Tensor, Tensor], None]:
        return lambda scores, _probabilities: gaps.put(place, _gap(scores.detach()))

    with hooked(model, [AttentionHook(part, observe=measure(place)) for place, part in enumerate(parts)]):
        yield gaps


def _gap(scores: Tensor) -> Tensor:
    if scores.shape[-1] < 2:
        return scores.new_full(scores.shape[:-1], math.inf)
    largest = scores.topk(2, dim=-1).values
    return largest[..., 0] - largest[..., 1]


def _one_per_module(factors: Factors, parts: Sequence[SoftmaxAttention]) -> list[Factor | None]:
    """A reader of each module's factor; None where it is the number 1 and there is nothing to do."""
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
        # Taken out anew when the module runs: the block may be entered without gradients and used with them.
        return lambda: cast(Tensor, factors[place])
    return lambda: torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in row])


def _constant(factor: Real) -> Factor | None:
    number = float(factor)
    return None if number == 1 else lambda: number
