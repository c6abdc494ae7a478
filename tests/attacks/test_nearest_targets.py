"""MALT's order of targets, on models where the nearest class is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitadel.attacks.autoattack.nearest_targets import linear_distances, nearest_targets
from vitadel.attacks.threats import L1, L2, Linf, dual_order


@pytest.fixture
def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6)).double()
    generator = torch.Generator().manual_seed(0)
    model[1].weight.data = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    return model


@pytest.mark.parametrize(("ball", "dual"), [(Linf(0.1), 1), (L2(0.1), 2), (L1(0.1), float("inf"))])
def test_on_a_linear_model_it_is_the_distance(linear, ball, dual):
    x = torch.rand(5, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits = linear(x).detach()
    y = logits.argmax(1)
    classes = torch.arange(6).expand(5, 6)
    found = linear_distances(linear, x, y, classes, dual_order(ball))
    weight = linear[1].weight.detach()
    for row in range(5):
        for column in range(6):
            slope = weight[y[row]] - weight[column]
            gap = logits[row, y[row]] - logits[row, column]
            expected = float(gap / slope.norm(p=dual)) if column != y[row] else float("inf")
            assert float(found[row, column]) == pytest.approx(expected)


def test_the_nearest_come_first_and_not_the_likeliest(linear):
    x = torch.rand(8, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits = linear(x).detach()
    y = logits.argmax(1)
    chosen = nearest_targets(linear, x, y, logits, Linf(0.1), candidates=5, wanted=3)
    distances = linear_distances(linear, x, y, torch.arange(6).expand(8, 6), 1.0)
    assert torch.equal(chosen, distances.argsort(dim=1)[:, :3])
    ranked = logits.scatter(1, y[:, None], -torch.inf).argsort(dim=1, descending=True)[:, :3]
    assert not torch.equal(chosen, ranked)  # else the two orders would be equal
    few = nearest_targets(linear, x, y, logits, Linf(0.1), candidates=5, wanted=9)
    assert torch.equal(few, logits.scatter(1, y[:, None], -torch.inf).argsort(dim=1, descending=True)[:, :5])


def test_a_class_without_slope_comes_last():
    class Flat(nn.Module):
        def forward(self, x):
            a = x.flatten(1)
            return torch.stack([a[:, 0] + 1, a[:, 1], a[:, 0] + 0.9, 0 * a[:, 2]], dim=1)

    x = torch.full((1, 3, 2, 2), 0.5)
    y = torch.tensor([0])
    found = linear_distances(Flat(), x, y, torch.tensor([[1, 2, 3]]), 1.0)
    assert found[0].tolist() == [0.5, float("inf"), 1.5]
