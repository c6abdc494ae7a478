"""The gates of TORA's fusion: what they sum to, which forms of them agree, and the maps drawn of them."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from toras import tora_of
from vitadel.adapters.tora.tora_fusion import GatedFusion, Gates, PfeifferFusion, row_mass
from vitadel.adapters.tora.tora_vit import gate_maps
from vitadel.errors import UserError
from vits import pixels


def lively(count: int, seed: int = 0) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2, 17, 24, dtype=torch.float64, generator=source).unbind()


@pytest.mark.parametrize("slot", ["shared", "separate"])
@pytest.mark.parametrize("name", ["vit", "dinov2_registers"])
def test_the_gates_of_two_adapters_sum_to_one(name: str, slot: str) -> None:
    tora = tora_of(name, lively=True, slot=slot)
    keys = (1 if name == "vit" else 5) + 16
    with torch.no_grad():
        gates = tora.gates(pixels(name))
    assert len(gates) == 2
    for each in gates:
        assert each.acc.shape == each.rob.shape == (2, 1, keys + (slot == "separate"), keys)
        assert each.classes == (2 if slot == "separate" else 1)
        torch.testing.assert_close(each.acc + each.rob, torch.ones_like(each.acc), rtol=0, atol=1e-6)
        assert (each.acc - 0.5).abs().max() > 0.2
        assert 0 <= each.acc.min() < each.acc.max() <= 1


@pytest.mark.parametrize("slot", ["shared", "separate"])
@pytest.mark.parametrize(
    ("settings", "mass"),
    [
        ({}, 17),
        ({"heads": 4}, 17),
        ({"softmax": "token"}, 2),
        ({"softmax": "joint", "heads": 2}, 1),
        ({"softmax": "adapterfusion"}, 1),
        ({"kind": "adapterfusion"}, 1),
    ],
)
def test_row_masses(settings: dict[str, Any], mass: int, slot: str) -> None:
    tora = tora_of(lively=True, slot=slot, **settings)
    with torch.no_grad():
        dense = [each.dense() for each in tora.gates(pixels("vit"))]
    for each in dense:
        rows = (each.acc + each.rob).sum(-1)
        assert rows.shape == (2, settings.get("heads", 1), 17 + (slot == "separate"))
        torch.testing.assert_close(rows, torch.full_like(rows, mass), rtol=1e-5, atol=0)
    assert row_mass(tora.settings.softmax, 17) == mass or tora.settings.kind == "adapterfusion"


def test_own_gates_lie_where_each_query_meets_its_own_token() -> None:
    gate = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    shared, separate = (Gates(gate, 1 - gate, classes).dense() for classes in (1, 2))
    assert torch.equal(shared.acc[0, 0], torch.diag(gate[0, 0]))
    expected = [[0.1, 0, 0], [0.2, 0, 0], [0, 0.3, 0], [0, 0, 0.4]]
    torch.testing.assert_close(separate.acc[0, 0], torch.tensor(expected))
    assert separate.rob[0, 0, 1].tolist() == pytest.approx([0.8, 0, 0])


def test_the_sigmoid_form_is_the_softmax_over_two_adapters() -> None:
    fusion = cast(GatedFusion, tora_of(lively=True).fusion[0])
    z, a, r = (each.float() for each in lively(3))
    with torch.no_grad():
        gates, _ = fusion._gates(z, a, r)
        q, to_a, to_r = fusion.query(z), fusion.key(a), fusion.key(r)
        naive = torch.stack([q @ to_a.mT, q @ to_r.mT]).div(24**0.5).softmax(0)
    torch.testing.assert_close(gates.acc[:, 0], naive[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(gates.rob[:, 0], naive[1], rtol=0, atol=1e-6)


def test_the_diagonal_of_adapter_is_adapterfusions_gate_and_every_variants_local_gate() -> None:
    fusion = cast(GatedFusion, tora_of(lively=True, precise=True).fusion[0])
    z, a, r = lively(3)
    found = {}
    with torch.no_grad():
        for softmax in ("adapter", "token", "joint", "adapterfusion"):
            fusion.softmax = softmax
            found[softmax] = fusion._gates(z, a, r)
    diagonal = found["adapter"][0].acc.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found["adapterfusion"][0].acc, diagonal)
    for _, local in found.values():
        torch.testing.assert_close(local, diagonal[..., 1:])


def test_the_value_matrix_of_adapterfusion_starts_at_the_identity() -> None:
    tora = tora_of(kind="adapterfusion")
    value = cast(PfeifferFusion, tora.fusion[0]).value
    assert value.bias is None
    assert torch.equal(value.weight, torch.full((24, 24), 1e-6).fill_diagonal_(1.0))
    # Two layers, 24 * 23 numbers of 1e-6 in each.
    assert tora.identity_penalty().item() == pytest.approx(0.01 * 2 * 24 * 23 * 1e-12, rel=1e-4)
    with torch.no_grad():
        value.weight[3, 5] = 2.0
    assert tora.identity_penalty(weight=0.5).item() == pytest.approx(2.0, rel=1e-6)
    tora.identity_penalty().backward()
    assert value.weight.grad is not None
    assert value.weight.grad[3, 5].item() == pytest.approx(0.04)
    assert tora_of().identity_penalty().item() == 0


# --- maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vit", "dinov2_registers"])
def test_maps_are_means_of_gates_over_patches(name: str) -> None:
    tora, x = tora_of(name, lively=True, heads=2), pixels(name)
    first = 1 if name == "vit" else 5
    with torch.no_grad():
        gates = tora.gates(x)
    maps = gate_maps(tora, x)
    assert maps.shape == (2, 2, 4, 4)
    for layer, each in enumerate(gates):
        expected = torch.stack([each.acc[:, :, :, first + patch].mean((1, 2)) for patch in range(16)], 1)
        torch.testing.assert_close(maps[layer].flatten(1), expected)
        other = each.rob[..., first:].mean((1, 2))  # the other adapter's map: the two sum to one
        torch.testing.assert_close(maps[layer].flatten(1) + other, torch.ones(2, 16))
    assert (maps - 0.5).abs().max() > 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"softmax": "token"},
        {"softmax": "joint"},
        {"softmax": "adapterfusion"},
        {"kind": "adapterfusion"},
        {"slot": "separate"},
    ],
)
def test_maps_of_variants_are_shares(settings: dict[str, Any]) -> None:
    tora, x = tora_of(lively=True, **settings), pixels("vit")
    maps = gate_maps(tora, x)
    assert maps.shape == (2, 2, 4, 4)
    assert 0 <= maps.min() < maps.max() <= 1
    with torch.no_grad():
        gates = tora.gates(x)[0]
    if gates.own:
        torch.testing.assert_close(maps[0].flatten(1), gates.acc[:, 0, gates.classes :])
    else:
        share = gates.acc.sum(2) / (gates.acc + gates.rob).sum(2)
        torch.testing.assert_close(maps[0].flatten(1), share[:, 0, 1:])


def test_fresh_maps_are_one_half_everywhere() -> None:
    assert torch.equal(gate_maps(tora_of(), pixels("vit")), torch.full((2, 2, 4, 4), 0.5))


def test_user_errors_are_reported() -> None:
    with pytest.raises(UserError, match="kind 'head' has no fusion and no gates"):
        gate_maps(tora_of(kind="head"), pixels("vit"))
