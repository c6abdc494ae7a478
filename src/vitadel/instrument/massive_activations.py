"""Massive activations: the few huge values in the residual stream (Sun et al., COLM 2024), layer by layer.

As in the analysis of Robustness Tokens (Pulfer et al., ECCV 2024, section 4.8), but per image, with the position of
each maximum, and with registers and extra tokens excluded by index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vitadel.backbones.anatomy import backbone_of, blocks_of, prefix_tokens_of
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, frozen, hooked, token_sequence
from vitadel.instrument.tokens import OwnTokens, own_tokens

CLASS, REGISTER, EXTRA = -1, -2, -3
"""Stand for tokens that are not patches, where patches have their numbers."""

_Largest = tuple[Tensor, Tensor, Tensor, Tensor]  # values, tokens, channels, patches; one of each per image


@dataclass(frozen=True, eq=False)
class MassiveActivations:
    """One row per layer, the first block's input and then each block's output; one column per image.

    `tokens` are positions in the blocks' input: class and register tokens, patches, and extra tokens where they were
    inserted. `patches` are the same tokens as numbers of patches, row by row, with or without extra tokens, or
    `CLASS`, `REGISTER` or `EXTRA`.
    """

    layers: tuple[str, ...]
    values: Tensor
    tokens: Tensor
    channels: Tensor
    patches: Tensor


def massive_activations(model: nn.Module, x: Tensor, excluded: Sequence[int] | None = None) -> MassiveActivations:
    """The largest |value| over tokens and channels, per layer and image, and its position.

    `excluded` are the numbers of tokens to leave out; None means registers and extra tokens. The model runs once, in
    eval mode and without gradients.
    """
    blocks = blocks_of(model)
    names = [f"input of {blocks[0].name}", *(block.name for block in blocks)]
    entering: list[Tensor] = []
    found: dict[int, _Largest] = {}
    with frozen(model), torch.no_grad(), own_tokens(model) as own:

        def measure(place: int, output: Tensor) -> None:
            stream = token_sequence(model, output)
            late = place > 0 and "Class" in type(blocks[place - 1].module).__name__
            roles = _roles(model, own, stream.shape[1], late).to(stream.device)
            out = ((roles == REGISTER) | (roles == EXTRA)).nonzero()[:, 0].tolist() if excluded is None else excluded
            value, token, channel = _largest(stream, out, names[place])
            found[place] = value, token, channel, roles[token]

        sites = [Edge(names[0], blocks[0].module, entering.append, before=True)]
        sites += [
            Edge(block.name, block.module, partial(measure, place)) for place, block in enumerate(blocks, start=1)
        ]
        with hooked(model, sites):
            model(x)
        measure(0, entering[-1])  # only now the extra tokens of this run are known
    values, tokens, channels, patches = (
        torch.stack([found[place][part] for place in range(len(names))]) for part in range(4)
    )
    return MassiveActivations(tuple(names), values, tokens, channels, patches)


def quartiles(values: Tensor) -> Tensor:
    """Lower quartile, median and upper quartile along the last axis, stacked in front: (..., n) -> (3, ...)."""
    if values.shape[-1] == 0:
        raise UserError("quartiles need at least one image, got none")
    return values.double().quantile(values.new_tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=-1)


def _roles(model: nn.Module, own: OwnTokens, count: int, late_class: bool) -> Tensor:
    """The role of each of `count` tokens: the number of a patch, `CLASS`, `REGISTER` or `EXTRA`.

    Registers are the last tokens before the patches; class attention puts its token first; `own` leaves extra tokens
    out.
    """
    registers, prefix = getattr(backbone_of(model), "reg_token", None), prefix_tokens_of(model) or int(late_class)
    last = registers.shape[1] if isinstance(registers, Tensor) else 0
    of_model = own(torch.arange(count), dim=0)
    patches = range(len(of_model) - prefix)
    roles = torch.full((count,), EXTRA)
    roles[of_model] = torch.tensor([*[CLASS] * (prefix - last), *[REGISTER] * last, *patches])
    return roles


def _largest(stream: Tensor, excluded: Sequence[int], layer: str) -> tuple[Tensor, Tensor, Tensor]:
    count, width = stream.shape[1:]
    wrong = [index for index in excluded if not 0 <= index < count]
    if wrong:
        raise UserError(
            f"massive_activations: no token {', '.join(map(str, wrong))} at '{layer}', which has {count} tokens. "
            f"Exclude numbers from 0 to {count - 1}."
        )
    if len(set(excluded)) == count:
        raise UserError(f"massive_activations: all {count} tokens at '{layer}' are excluded. Leave at least one.")
    size = stream.to(torch.promote_types(stream.dtype, torch.float32)).abs()
    size[:, list(excluded)] = -1.0
    value, place = size.flatten(1).max(dim=1)
    return value, place // width, place % width
