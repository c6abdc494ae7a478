"""What follows each block of a TORA-ViT (Li & Xu, CVPR 2023): two bottleneck adapters and their fusion.

The fusion takes the block's output as queries, (batch, queries, width), and the input and change of each adapter,
(batch, keys, width). Key 0 is the branch's own class token. The first queries are those of the class tokens: one for
both branches, or one for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from vitadel.runtime.rng import SampleRNG

_SCALE = 0.02  # standard deviation of fresh weights, in ViTs as in AdapterFusion
_OFF_DIAGONAL = 1e-6  # of AdapterFusion's first value matrix


class Tokens(NamedTuple):
    """The residual stream between blocks: a class token per branch, (batch, 1, width), and all other tokens."""

    acc: Tensor
    rob: Tensor
    rest: Tensor


class Adapted(NamedTuple):
    """The input of an adapter, and what the adapter adds to it."""

    given: Tensor
    change: Tensor

    @property
    def output(self) -> Tensor:
        return self.given + self.change


@dataclass(frozen=True)
class Gates:
    """Weights of each adapter, (batch, heads, queries, keys), or (batch, heads, queries) if each query only attends to
    its own token. The first `classes` queries are those of class tokens.
    """

    acc: Tensor
    rob: Tensor
    classes: int

    @property
    def own(self) -> bool:
        """Whether every query only attends to its own token."""
        return self.acc.dim() == 3

    def dense(self) -> Gates:
        """The same for all pairs of tokens, with zeros elsewhere."""
        if not self.own:
            return self
        queries = self.acc.shape[2]
        looked_at = _own_keys(torch.eye(queries - self.classes + 1).to(self.acc), queries)
        return Gates(self.acc[..., None] * looked_at, self.rob[..., None] * looked_at, self.classes)


class Bottleneck(nn.Module):
    """The change an adapter makes (after Pfeiffer et al. 2021): up(GELU(down(LN(u)))), initially 0 as `up` is."""

    def __init__(self, width: int, hidden: int, like: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, device=like.device, dtype=like.dtype)
        self.down = blank_linear(width, hidden, like)
        self.up = blank_linear(hidden, width, like)

    def start(self, seed: int, *place: int) -> None:
        start_linear(self.down, _SCALE, seed, "down", *place)
        start_linear(self.up, 0.0, seed, "up", *place)

    def forward(self, u: Tensor) -> Tensor:
        change: Tensor = self.up(nn.functional.gelu(self.down(self.norm(u))))
        return change


class GatedFusion(nn.Module):
    """TORA's fusion: attention of the block's features to both adapters' outputs, with a softmax over the adapters.

    Softmax "adapter" is computed as the sigmoid of a difference of scores, which saves one matrix product. Each row of
    gates is divided by its sum, `row_mass`, so that the result is a mean. Tokens other than class tokens also mix their
    own two versions, by the gate of the token with itself; without this local gate the untrained module, whose values
    are 0, could not equal the pretrained model.
    """

    def __init__(self, width: int, heads: int, softmax: str, like: Tensor) -> None:
        super().__init__()
        self.heads = heads
        self.softmax = softmax
        self.query = blank_linear(width, width, like)
        self.key = blank_linear(width, width, like)
        self.value = blank_linear(width, width, like)

    def start(self, seed: int, layer: int) -> None:
        start_linear(self.query, _SCALE, seed, "query", layer)
        start_linear(self.key, _SCALE, seed, "key", layer)
        start_linear(self.value, 0.0, seed, "value", layer)

    def forward(self, z: Tensor, acc: Adapted, rob: Adapted) -> tuple[Tokens, Gates]:
        a, r = acc.output, rob.output
        gates, local = self._gates(z, a, r)
        mass = row_mass(self.softmax, a.shape[1])
        from_a, from_r = (
            self._merged(self._weighted(gate, self._split(self.value(each)))) / mass
            for gate, each in ((gates.acc, a), (gates.rob, r))
        )
        first = _first_other(z, a)
        # Written as r + g (a - r), so that equal versions stay equal, bit for bit.
        mixed = r[:, 1:] + self._merged(local[..., None] * self._split((a - r)[:, 1:]))
        rest = mixed + from_a[:, first:] + from_r[:, first:]
        return Tokens(a[:, :1] + from_a[:, :1], r[:, :1] + from_r[:, first - 1 : first], rest), gates

    def _gates(self, z: Tensor, a: Tensor, r: Tensor) -> tuple[Gates, Tensor]:
        """The gates, and the local gate of each token with itself (softmax "adapter"), (batch, heads, other tokens)."""
        q, to_a, to_r = self._split(self.query(z)), self._split(self.key(a)), self._split(self.key(r))
        q, first = q / math.sqrt(q.shape[-1]), _first_other(z, a)
        if self.softmax == "adapterfusion":
            alone = _competing((_precise(q) * _own_keys(to_a - to_r, q.shape[2])).sum(-1), first, z.dtype)
            return alone, alone.acc[..., first:]
        if self.softmax == "adapter":
            pairs = _competing(q @ (to_a - to_r).mT, first, z.dtype)
            return pairs, pairs.acc[..., first:, 1:].diagonal(dim1=-2, dim2=-1)
        scores = torch.stack([_precise(q @ to_a.mT), _precise(q @ to_r.mT)])
        own = scores[..., first:, 1:].diagonal(dim1=-2, dim2=-1)
        local = (own[0] - own[1]).sigmoid().to(z.dtype)
        if self.softmax == "token":
            shares = scores.softmax(-1)
        else:
            shares = torch.stack(torch.cat([scores[0], scores[1]], -1).softmax(-1).chunk(2, -1))
        shares = shares.to(z.dtype)
        return Gates(shares[0], shares[1], first), local

    def _weighted(self, gate: Tensor, values: Tensor) -> Tensor:
        return gate @ values if gate.dim() == 4 else gate[..., None] * _own_keys(values, gate.shape[2])

    def _split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return x.reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)

    def _merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


class PfeifferFusion(nn.Module):
    """AdapterFusion (Pfeiffer et al., EACL 2021): at each token a softmax over the adapters, of unscaled scores.

    Keys and values come from the adapters' changes; the mixed values are added to the adapters' input. The value matrix
    has no bias and starts as the identity with 1e-6 off the diagonal; a penalty keeps it near the identity.
    """

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.query = blank_linear(width, width, like)
        self.key = blank_linear(width, width, like)
        self.value = blank_linear(width, width, like, bias=False)

    def start(self, seed: int, layer: int) -> None:
        start_linear(self.query, _SCALE, seed, "query", layer)
        start_linear(self.key, _SCALE, seed, "key", layer)
        with torch.no_grad():
            self.value.weight.fill_(_OFF_DIAGONAL).fill_diagonal_(1.0)

    def forward(self, z: Tensor, acc: Adapted, rob: Adapted) -> tuple[Tokens, Gates]:
        queries, first = z.shape[1], _first_other(z, acc.given)
        keys = _own_keys(self.key(acc.change) - self.key(rob.change), queries)
        gates = _competing((_precise(self.query(z)) * keys).sum(-1)[:, None], first, z.dtype)
        mixed = gates.acc[:, 0, :, None] * _own_keys(self.value(acc.change), queries)
        mixed = mixed + gates.rob[:, 0, :, None] * _own_keys(self.value(rob.change), queries)
        own_acc, own_rob = acc.given[:, :1] + mixed[:, :1], rob.given[:, :1] + mixed[:, first - 1 : first]
        return Tokens(own_acc, own_rob, z[:, first:] + mixed[:, first:]), gates

    def far_from_identity(self) -> Tensor:
        """The squared distance of the value matrix from the identity."""
        weight = self.value.weight
        return (weight - torch.eye(len(weight), device=weight.device, dtype=weight.dtype)).square().sum()


def row_mass(softmax: str, keys: int) -> int:
    """The sum of both adapters' gates over all keys, for each query."""
    return {"adapter": keys, "token": 2, "joint": 1, "adapterfusion": 1}[softmax]


def blank_linear(inputs: int, outputs: int, like: Tensor, bias: bool = True) -> nn.Linear:
    """A linear layer without values, made without using torch's global generator."""
    linear: nn.Linear = skip_init(nn.Linear, inputs, outputs, bias=bias, device=like.device, dtype=like.dtype)
    return linear


def start_linear(linear: nn.Linear, scale: float, seed: int, name: str, *place: int) -> None:
    """Fill the weight with `scale` times normal numbers of seed, name and place (not on meta), the bias with 0."""
    rows, columns = linear.weight.shape
    with torch.no_grad():
        if scale and not linear.weight.is_meta:
            noise = SampleRNG.of_samples(seed, range(rows)).stream(f"tora {name}", *place).normal(columns)
            linear.weight.copy_(scale * noise)
        else:
            linear.weight.zero_()
        if linear.bias is not None:
            linear.bias.zero_()


def _competing(difference: Tensor, classes: int, kind: torch.dtype) -> Gates:
    """The softmax over two adapters, from the difference of their scores."""
    share = _precise(difference).sigmoid()
    return Gates(share.to(kind), (1 - share).to(kind), classes)


def _precise(scores: Tensor) -> Tensor:
    """At least float32, also under autocast."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _first_other(z: Tensor, keys: Tensor) -> int:
    """The number of class queries: 1 if the branches share one, 2 if each has its own."""
    return z.shape[1] - keys.shape[1] + 1


def _own_keys(keys: Tensor, queries: int) -> Tensor:
    """For each query the key of its own token, along the last but one dimension."""
    more = queries - keys.shape[-2]
    return torch.cat([keys[..., :1, :], keys], -2) if more else keys
