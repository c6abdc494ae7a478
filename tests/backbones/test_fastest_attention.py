"""Attention is taken apart where that is faster, computes the same, and is put together again."""

from __future__ import annotations

import pytest
import torch

from vitadel.backbones.classifier import fastest_attention
from vits import make_vit, pixels

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def fused(model):
    return [module.fused_attn for module in model.modules() if hasattr(module, "fused_attn")]


@pytest.mark.parametrize(
    ("device", "kind", "expected"),
    [(CPU, torch.bfloat16, False), (CPU, None, True), (GPU, torch.bfloat16, True)],
)
def test_only_half_precision_on_a_processor_takes_it_apart(device, kind, expected):
    model = make_vit("vit", fused=True)
    assert all(fused(model))
    with fastest_attention(model, device, kind):
        assert set(fused(model)) == {expected}
    assert all(fused(model))


def test_an_attention_that_was_apart_stays_apart_also_after_an_error():
    model = make_vit("vit", fused=True)
    first = next(module for module in model.modules() if hasattr(module, "fused_attn"))
    first.fused_attn = False
    before = fused(model)
    with pytest.raises(RuntimeError, match="stop"), fastest_attention(model, CPU, torch.bfloat16):
        raise RuntimeError("stop")
    assert fused(model) == before


def test_the_answers_are_the_same():
    model, x = make_vit("vit", fused=True).eval(), pixels("vit")
    with torch.no_grad():
        together = model(x)
        with fastest_attention(model, CPU, torch.bfloat16):
            apart = model(x)
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-5)
