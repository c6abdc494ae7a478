"""TORA against its formulas, written down once more: two-way softmax, all pairs of tokens, one image at a time."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from toras import enlivened, tora_of
from vitadel.adapters.tora.tora_vit import Tora
from vits import pixels


class Side(NamedTuple):
    """A branch after a block: its class token's query, what its adapter was given, and what that added."""

    query: Tensor
    given: Tensor
    added: Tensor


def branches(tora: Tora, x: Tensor) -> list[Tensor]:
    """Logits of both branches."""
    state: dict[str, Any] = dict(tora.named_parameters())
    backbone: Any = tora.classifier.backbone
    mean, std = tora.classifier.mean[0], tora.classifier.std[0]
    logits: list[list[Tensor]] = [[], []]
    for image in x:
        stream = backbone.norm_pre(backbone._pos_embed(backbone.patch_embed(((image - mean) / std)[None])))[0]
        tokens, rest = [state[f"{name}.token"][0, 0] for name in ("acc", "rob")], stream[1:]
        for layer, block in enumerate(backbone.blocks):
            step = shared if tora.settings.slot == "shared" else separate
            queries, given, others = step(block, tokens, rest)
            sides = [
                Side(query, u, adapter(state, f"{name}.adapters.{layer}", u))
                for name, query, u in zip(("acc", "rob"), queries, given, strict=True)
            ]
            fuse = pfeiffer if tora.settings.kind == "adapterfusion" else fused
            tokens, rest = fuse(tora, state, f"fusion.{layer}", sides, others)
        for place, name in enumerate(("acc", "rob")):
            last = backbone.norm(torch.stack([tokens[place], *rest]))[0]
            logits[place].append(last @ state[f"{name}.head.weight"].T + state[f"{name}.head.bias"])
    return [torch.stack(each) for each in logits]


def shared(block: Any, tokens: list[Tensor], rest: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    middle = (tokens[0] + tokens[1]) / 2
    z = block(torch.stack([middle, *rest])[None])[0]
    return [z[0], z[0]], [torch.stack([token + z[0] - middle, *z[1:]]) for token in tokens], z[1:]


def separate(block: Any, tokens: list[Tensor], rest: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Registers and patches in any order: blocks are blind to it."""
    lower = torch.zeros(1, 1, 1, len(rest) + 2, dtype=rest.dtype)
    lower[..., :2] = math.log(0.5)
    z = block(torch.stack([*tokens, *rest])[None], attn_mask=lower)[0]
    return [z[0], z[1]], [torch.stack([z[place], *z[2:]]) for place in range(2)], z[2:]


def adapter(state: dict[str, Any], name: str, u: Tensor) -> Tensor:
    normed = F.layer_norm(u, u.shape[-1:], state[f"{name}.norm.weight"], state[f"{name}.norm.bias"])
    hidden = F.gelu(linear(state, f"{name}.down", normed))
    return linear(state, f"{name}.up", hidden)


def linear(state: dict[str, Any], name: str, u: Tensor) -> Tensor:
    result: Tensor = u @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)
    return result


def fused(
    tora: Tora, state: dict[str, Any], name: str, sides: list[Side], others: Tensor
) -> tuple[list[Tensor], Tensor]:
    outputs = [side.given + side.added for side in sides]
    width = others.shape[1] // tora.settings.heads
    found = []
    for place in range(2):  # each branch with its own class query; what comes out for other tokens is the same
        q = linear(state, f"{name}.query", torch.stack([sides[place].query, *others]))
        parts = []
        for head in range(tora.settings.heads):
            own = slice(head * width, (head + 1) * width)
            scores = [q[:, own] @ linear(state, f"{name}.key", m)[:, own].T / width**0.5 for m in outputs]
            values = [linear(state, f"{name}.value", m)[:, own] for m in outputs]
            mixes = weighed(tora.settings.softmax, torch.stack(scores), values)
            local = torch.stack(scores).softmax(0).diagonal(dim1=1, dim2=2)
            mixed = sum(gate[:, None] * m[:, own] for gate, m in zip(local, outputs, strict=True)) + mixes[0] + mixes[1]
            mixed[0] = outputs[place][0, own] + mixes[place][0]
            parts.append(mixed)
        found.append(torch.cat(parts, 1))
    torch.testing.assert_close(found[0][1:], found[1][1:])
    return [each[0] for each in found], found[0][1:]


def weighed(softmax: str, scores: Tensor, values: list[Tensor]) -> list[Tensor]:
    """What each adapter gives, with rows of gates divided by their mass."""
    count = scores.shape[1]
    gates, mass = {
        "adapter": (scores.softmax(0), count),
        "token": (scores.softmax(2), 2),
        "joint": (torch.cat([*scores], 1).softmax(1).view(count, 2, count).transpose(0, 1), 1),
        "adapterfusion": (scores.softmax(0) * torch.eye(count, dtype=scores.dtype), 1),
    }[softmax]
    torch.testing.assert_close(gates.sum((0, 2)), torch.full((count,), float(mass), dtype=scores.dtype))
    return [gate @ value / mass for gate, value in zip(gates, values, strict=True)]


def pfeiffer(
    tora: Tora, state: dict[str, Any], name: str, sides: list[Side], others: Tensor
) -> tuple[list[Tensor], Tensor]:
    found = []
    for side in sides:
        q = linear(state, f"{name}.query", torch.stack([side.query, *others]))
        shares = torch.stack([(q * linear(state, f"{name}.key", each.added)).sum(1) for each in sides]).softmax(0)
        mix = [s[:, None] * linear(state, f"{name}.value", m.added) for s, m in zip(shares, sides, strict=True)]
        found.append(side.given + mix[0] + mix[1])
    return [each[0] for each in found], found[0][1:]


@pytest.mark.parametrize("slot", ["shared", "separate"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"heads": 3},
        {"softmax": "token"},
        {"softmax": "joint", "heads": 2},
        {"softmax": "adapterfusion", "heads": 2},
        {"kind": "adapterfusion"},
    ],
)
@pytest.mark.parametrize("name", ["clip", "dinov2_registers"])
def test_it_computes_what_is_written_down(name: str, settings: dict[str, Any], slot: str) -> None:
    tora, x = tora_of(name, precise=True, slot=slot, **settings), pixels(name, dtype=torch.float64)
    enlivened(tora)
    with torch.no_grad():
        found, expected = tora.branches(x), branches(tora, x)
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=0, atol=1e-9)
        assert (found[0] - found[1]).abs().max() > 0.1
        assert (found[0] - tora.classifier(x)).abs().max() > 0.1


def test_a_single_adapter_stands_after_each_block() -> None:
    tora, x = tora_of(kind="single", lively=True, precise=True), pixels("vit", dtype=torch.float64)
    state, backbone = dict(tora.named_parameters()), tora.classifier.backbone
    vit: Any = backbone
    with torch.no_grad():
        stream = vit._pos_embed(vit.patch_embed((x - tora.classifier.mean) / tora.classifier.std))
        stream = torch.cat([state["single.token"].expand(2, 1, 24), stream[:, 1:]], 1)
        for layer, block in enumerate(vit.blocks):
            stream = block(stream)
            stream = stream + adapter(state, f"single.adapters.{layer}", stream)
        expected = linear(state, "single.head", vit.norm(stream)[:, 0])
        torch.testing.assert_close(tora(x), expected, rtol=0, atol=1e-10)
