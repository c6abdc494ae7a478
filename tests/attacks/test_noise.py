"""Noise: inside the budget, of the promised kind, and blind to the model."""

from __future__ import annotations

import pytest
import torch

from toys import TinyNet, images
from vitadel.attacks import make
from vitadel.attacks.random_noise import Noise
from vitadel.attacks.threats import Linf
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

EPS = 8 / 255


def change(kind, x):
    rng = SampleRNG.of_samples(0, range(len(x)))
    return Noise(Linf(EPS), kind)(TinyNet(3), x, torch.zeros(len(x), dtype=torch.int64), rng) - x


def test_uniform_noise_fills_the_ball_evenly():
    x = torch.full((4, 3, 32, 32), 0.5)
    delta = change("uniform", x) / EPS
    assert delta.abs().max() <= 1 + 1e-5
    assert delta.mean().abs() < 0.02
    assert delta.std() == pytest.approx(3**-0.5, abs=0.01)  # of a uniform number in [-1, 1]


def test_surface_noise_stands_in_the_corners():
    x = torch.full((4, 3, 32, 32), 0.5)
    delta = change("surface", x) / EPS
    assert torch.allclose(delta.abs(), torch.ones_like(delta), atol=1e-5)
    assert delta.mean().abs() < 0.05


def test_gaussian_noise_has_half_the_budget_and_is_cut_to_it():
    x = torch.full((4, 3, 32, 32), 0.5)
    delta = change("gaussian", x) / EPS
    assert delta.abs().max() <= 1 + 1e-5
    inside = delta[delta.abs() < 0.999]
    # A normal number of deviation 1/2 cut off at two deviations has a deviation of 0.88 / 2.
    assert inside.std() == pytest.approx(0.5 * 0.8796, abs=0.01)
    assert ((delta.abs() >= 0.999).float().mean() - 0.0455).abs() < 0.01  # two-sided tail beyond two deviations


def test_no_pass_is_spent():
    assert make("noise").passes() == (0, 0)
    with pytest.raises(UserError, match="unknown kind of noise 'unifrom'; did you mean"):
        make("noise(kind=unifrom)")


def test_restarts_draw_again():
    x = images(3)
    attack = make("noise(restarts=2)")
    y = torch.zeros(3, dtype=torch.int64)

    class Right(torch.nn.Module):
        def forward(self, z):
            return torch.tensor([[1.0, 0.0]]).expand(len(z), 2) + 0 * z.mean((1, 2, 3))[:, None]

    rng = SampleRNG.of_samples(0, range(3))
    again = make("noise")(Right(), x, y, rng.stream("restart", 1))
    assert torch.equal(attack(Right(), x, y, rng), again)
