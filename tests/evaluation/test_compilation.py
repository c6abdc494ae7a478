"""Whether torch.compile pays is measured, and without a compiler everything still works."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf
from vitadel.evaluation.engine import cost
from vitadel.evaluation.engine.cost import Compilation, compile_if_faster
from vitadel.evaluation.engine.stages import count_passes


def test_summary():
    assert Compilation(1.5, 40).pays
    assert not Compilation(1.05, 40).pays
    assert "does not pay: 1.05 times" in Compilation(1.05, 40).summary()
    assert "torch.compile pays: 1.50 times as fast after 40 s" in Compilation(1.5, 40).summary()
    assert "failed here (InvalidCxxCompiler)" in Compilation(0.0, 0.0, "InvalidCxxCompiler").summary()


def test_a_compiler_that_fails_is_survived(monkeypatch):
    def fail(model: nn.Module, **settings: object) -> nn.Module:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    model = TinyNet().eval()
    chosen, verdict = compile_if_faster(model, images(4))
    assert chosen is model
    assert not verdict.pays
    assert verdict.reason == "RuntimeError"


@pytest.mark.parametrize(("speedup", "pays"), [(2.0, True), (1.0, False)])
def test_it_is_used_only_where_it_is_faster(monkeypatch, speedup, pays):
    model = TinyNet().eval()
    twin = TinyNet().eval()
    times = iter([speedup, 1.0])
    monkeypatch.setattr(torch, "compile", lambda model, **settings: twin)
    monkeypatch.setattr(cost, "seconds_of", lambda work, device: next(times))
    chosen, verdict = compile_if_faster(model, images(4))
    assert chosen is (twin if pays else model)
    assert verdict.speedup == speedup


@pytest.mark.slow
def test_a_really_compiled_model_is_metered_and_agrees():
    """With the backend that compiles nothing, which needs no C compiler."""
    model = TinyNet().eval().requires_grad_(False)
    fast = torch.compile(model, dynamic=True, backend="eager")
    x = images(4)
    attack = PGD(Linf(1e-4), steps=3)
    y = model(x).argmax(1)
    with count_passes(fast) as cost:
        z = attack(fast, x, y)
    assert (cost.gradients, cost.forwards) == (12, 0)
    assert torch.allclose(z, attack(model, x, y))
