"""Maps of TORA's adapters, and the deletion and insertion check on models that look at known patches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from toras import classifier_of, tora_of
from vitadel.adapters.tora.tora_settings import ToraSettings
from vitadel.adapters.tora.tora_vit import Tora, gate_maps
from vitadel.evaluation.engine.target import open_target
from vitadel.evaluation.trade_off.adapter_maps import PARTS, area, deletion_and_insertion, patch_orders
from vitadel.evaluation.trade_off.candidates import Candidate
from vitadel.evaluation.trade_off.run import TradeOffRequest, run_trade_off
from vitadel.instrument import attention_maps
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vits import pixels

GRAY = (0.5, 0.5, 0.5)


class OnePatch(nn.Module):
    """Two classes, told apart by the brightness of one patch of a 5 x 4 grid alone."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__()
        self.row, self.column = row, column

    def forward(self, x):
        patch = x[:, :, 8 * self.row : 8 * self.row + 8, 8 * self.column : 8 * self.column + 8]
        return torch.stack([10 * patch.mean((1, 2, 3)), torch.full((len(x),), 5.0)], 1)


@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_planted_map_loses_everything_at_once(place):
    x = torch.full((2, 3, 40, 32), 0.9)
    y = torch.zeros(2, dtype=torch.int64)
    model, others = OnePatch(place // 4, place % 4), [each for each in range(20) if each != place]
    request = torch.tensor([[place, *others]] * 2)
    deletion, insertion = deletion_and_insertion(model, x, y, request, (5, 4), GRAY)
    seen, blind = 1 / (1 + math.exp(-4)), 0.5
    assert deletion[0].tolist() == pytest.approx([seen] + [blind] * PARTS)
    assert insertion[0].tolist() == pytest.approx([blind] + [seen] * PARTS)
    assert float(area(deletion)[0]) == pytest.approx(blind + (seen - blind) / 2 / PARTS)
    last, first = deletion_and_insertion(model, x, y, request.flip(1), (5, 4), GRAY)
    assert torch.equal(last, insertion.flip(1))  # hiding by the order backwards is showing by the order
    assert torch.equal(first, deletion.flip(1))


def test_areas_of_known_curves():
    curve = torch.stack([torch.ones(11), torch.linspace(0, 1, 11), torch.linspace(0, 1, 11) ** 2])
    assert area(curve).tolist() == pytest.approx([1, 0.5, 1 / 3 + 1 / 600])


@pytest.mark.parametrize("settings", [{}, {"slot": "separate"}, {"kind": "adapterfusion"}])
def test_orders_of_patches(settings):
    tora, x = tora_of(lively=True, **settings).eval(), pixels("vit", batch=3)
    maps = gate_maps(tora, x)
    with torch.no_grad():
        requests = patch_orders(tora, x, maps, SampleRNG.of_samples(0, range(3)))
    ranked = maps.mean(0).flatten(1).gather(1, requests["map"][0])
    assert (ranked[:, :-1] >= ranked[:, 1:]).all()
    assert (ranked[:, 0] > ranked[:, -1]).all()
    with torch.no_grad(), attention_maps(tora) as seen:
        tora(x)
    skipped = seen[-1].shape[-1] - 16  # class tokens stand before the patches
    assert skipped == (2 if settings.get("slot") == "separate" else 1)
    looked = seen[-1][:, :, 0, skipped:].mean(1).gather(1, requests["attention"][0])
    assert (looked[:, :-1] >= looked[:, 1:]).all()
    for request in (each for several in requests.values() for each in several):
        assert request.sort(1).values.tolist() == [list(range(16))] * 3
    assert not torch.equal(requests["random"][0], requests["random"][1])


def robust_side(seed=0):
    """Its adapters differ, so that its maps are not all one half."""
    tora = Tora(classifier_of(classes=10), ToraSettings(reduction=8), trade_off=0.3).eval()
    with torch.no_grad():
        for number, parameter in enumerate(tora.rob.parameters(), start=seed):
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    return tora


@pytest.mark.slow
def test_names_that_differ_in_signs_only_keep_their_maps_apart(tmp_path):
    toras = {"run 1": robust_side(), "run+1": robust_side(50)}
    members = [Candidate(name, open_target(tora, "shapes(size=32)@test")) for name, tora in toras.items()]
    request = TradeOffRequest(eps=(1 / 255,), attacks=("fgsm",), aimed=(), maps=2, limit=10, batch_size=2)
    out = run_trade_off(members, request, join_processes("cpu"), out=tmp_path / "run")
    with np.load(out.folder.path / "maps.npz", allow_pickle=False) as arrays:
        x = torch.from_numpy(arrays["x"]).float() / 255
        kept = {name: torch.from_numpy(arrays[f"maps:{name}"]) for name in toras}
    for name, tora in toras.items():
        torch.testing.assert_close(kept[name], gate_maps(tora, x), atol=1e-5, rtol=0)
    assert (kept["run 1"] - kept["run+1"]).abs().max() > 1e-3


@pytest.mark.slow
def test_a_trade_off_keeps_and_checks_maps(tmp_path):
    tora = robust_side()
    candidate = Candidate("one", open_target(tora, "shapes(size=32)@test"))
    request = TradeOffRequest(eps=(1 / 255,), attacks=("fgsm",), aimed=(), maps=3, limit=10, batch_size=2)
    out = run_trade_off([candidate], request, join_processes("cpu"), out=tmp_path / "run")
    reported = out.results["trade_off"]["maps"]
    assert reported["n"] == 3
    with np.load(out.folder.path / "maps.npz", allow_pickle=False) as arrays:
        x, maps = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["maps:one"])
    assert len(x) == maps.shape[1] == 3
    x = x.float() / 255
    torch.testing.assert_close(maps, gate_maps(tora, x), atol=1e-5, rtol=0)
    with torch.no_grad():
        gates = tora.gates(x)
    for layer, gate in enumerate(gates):  # the other adapter's map, from its own gates
        other = gate.rob.mean((1, 2))[:, 1:].view(3, *maps.shape[2:])
        torch.testing.assert_close(maps[layer] + other, torch.ones_like(other), atol=1e-5, rtol=0)
    (entry,) = reported["contenders"]
    assert entry["share_by_layer"] == pytest.approx(maps.mean((1, 2, 3)).tolist(), abs=1e-6)
    for kind in ("deletion", "insertion"):
        by = entry[kind]
        assert entry[f"{kind}_differences"]["map - random"]["mean"] == pytest.approx(
            by["map"]["mean"] - by["random"]["mean"]
        )
    with torch.no_grad():
        requests = patch_orders(tora, x, maps, SampleRNG.of_samples(0, [0, 0, 0]))
        answer = tora(x).argmax(1)
        deletion, _ = deletion_and_insertion(
            tora, x, answer, requests["map"][0], tuple(maps.shape[2:]), tora.record.mean
        )
    assert entry["deletion"]["map"]["mean"] == pytest.approx(float(area(deletion).mean()), abs=1e-4)
