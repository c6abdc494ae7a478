"""Noise of gradients: measures whose answer is known."""

from __future__ import annotations

import pytest
import torch

from toys import TinyNet
from vitadel.studies.gradients import agreement, input_gradients, roughness


def test_roughness_of_noise_of_a_checkerboard_and_of_a_constant() -> None:
    noise = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert roughness(noise).tolist() == pytest.approx([1] * 4, abs=0.03)
    assert roughness(1e-20 * noise).tolist() == pytest.approx(roughness(noise).tolist())
    constant = torch.full((1, 3, 8, 8), -2.0)
    assert roughness(constant).item() == 0
    board = (-1.0) ** (torch.arange(8)[:, None] + torch.arange(8)).expand(1, 3, 8, 8)
    assert roughness(board).item() == pytest.approx(2**0.5)  # neighbors differ by twice their size
    assert roughness(torch.zeros(1, 3, 8, 8)).isnan().all()


def test_agreement_is_a_cosine_and_unknown_for_zero() -> None:
    g = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    other = torch.stack([2 * g[0], -g[1], torch.zeros_like(g[2])])
    assert agreement(g, other)[:2].tolist() == pytest.approx([1, -1])
    assert agreement(g, other)[2].isnan()


def test_gradients_are_each_images_own() -> None:
    model, x = TinyNet().eval(), torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    y = torch.tensor([0, 1, 0])
    together = input_gradients(model, x, y)
    for place in range(3):
        alone = input_gradients(model, x[place : place + 1], y[place : place + 1])
        assert torch.allclose(together[place], alone[0], atol=1e-7)
