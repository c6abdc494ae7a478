"""The geometry of the balls, against independent computations."""

from __future__ import annotations

import pytest
import torch

from toys import images
from vitadel.attacks.threats import L1, L2, NORMS, Linf, make_threat
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

BUDGETS = {"linf": 0.1, "l2": 1.3, "l1": 9.0}


def far_points(x: torch.Tensor, reach: float) -> torch.Tensor:
    return x + reach * SampleRNG.of_samples(9, range(len(x))).normal(*x.shape[1:])


def nearest_by_bisection(z: torch.Tensor, x: torch.Tensor, eps: float) -> torch.Tensor:
    """The projection onto the L1 ball cut with the box, by bisection on the multiplier instead of by sorting."""
    delta, start = (z - x).double().flatten(1), x.double().flatten(1)
    room = torch.where(delta > 0, 1 - start, start)

    def clipped(shift):
        return torch.minimum((delta.abs() - shift[:, None]).clamp(min=0), room)

    low, high = torch.zeros(len(x)).double(), delta.abs().amax(1)
    for _ in range(200):
        middle = (low + high) / 2
        above = clipped(middle).sum(1) > eps
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    inside = clipped(torch.zeros_like(low)).sum(1) <= eps
    shift = torch.where(inside, torch.zeros_like(high), high)
    return (start + clipped(shift) * delta.sign()).view_as(x)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("reach", [0.001, 0.2, 5.0])
def test_projection_lands_in_ball_and_box_and_keeps_what_is_inside(norm, reach):
    ball, x = make_threat(norm, BUDGETS[norm]), images(6)
    z = ball.project(far_points(x, reach), x)
    assert ball.size(z, x).max() <= BUDGETS[norm] + 1e-6
    assert z.min() >= 0
    assert z.max() <= 1
    assert torch.allclose(ball.project(z, x), z, atol=2e-6)


@pytest.mark.parametrize("reach", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("eps", [0.5, 9.0, 60.0])
def test_l1_projection_is_the_nearest_point(reach, eps):
    x = images(5)
    z = far_points(x, reach)
    assert torch.allclose(L1(eps).project(z, x).double(), nearest_by_bisection(z, x, eps), atol=2e-5)


def test_l1_projection_uses_the_whole_budget():
    x = images(5)
    size = L1(9.0).size(L1(9.0).project(far_points(x, 1.0), x), x)
    assert torch.allclose(size, torch.full_like(size, 9.0), rtol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_ascent_has_length_one_and_beats_every_other_direction(norm):
    ball = make_threat(norm, 1.0) if norm != "l1" else L1(1.0, sparsity=0.0)
    z = torch.full((4, 3, 8, 8), 0.5)
    grad = SampleRNG.of_samples(3, range(4)).normal(3, 8, 8)
    step = ball.ascent(grad, z)
    assert torch.allclose(ball.size(step, torch.zeros_like(step)), torch.ones(4).double(), atol=1e-5)
    gain = (step * grad).flatten(1).sum(1)
    for seed in range(20):
        other = SampleRNG.of_samples(seed, range(4)).stream("other").normal(3, 8, 8)
        other = other / ball.size(other, torch.zeros_like(other)).view(-1, 1, 1, 1).float()
        assert (gain >= (other * grad).flatten(1).sum(1) - 1e-5).all()


def test_l1_ascent_skips_pixels_that_cannot_move():
    z = torch.full((1, 3, 2, 2), 0.5)
    z[0, 0, 0, 0] = 1.0
    grad = torch.full_like(z, 0.1)
    grad[0, 0, 0, 0], grad[0, 1, 0, 0] = 5.0, 1.0
    step = L1(1.0, sparsity=0.0).ascent(grad, z)
    assert step[0, 1, 0, 0] == 1.0
    assert step.abs().sum() == 1.0


@pytest.mark.parametrize("norm", NORMS)
def test_zero_gradient_gives_a_zero_step(norm):
    x = images(2)
    assert torch.equal(make_threat(norm, 1.0).ascent(torch.zeros_like(x), x), torch.zeros_like(x))


@pytest.mark.parametrize("norm", NORMS)
def test_random_starts_fill_the_ball_differently_for_each_sample(norm):
    ball, x = make_threat(norm, BUDGETS[norm]), images(8)
    z = ball.random(x, SampleRNG.of_samples(0, range(8)))
    sizes = ball.size(z, x)
    assert (sizes > 0).all()
    assert sizes.max() <= BUDGETS[norm] + 1e-6
    assert not torch.allclose((z - x)[0], (z - x)[1])


def test_linf_start_is_uniform():
    x = torch.full((64, 3, 8, 8), 0.5)
    shift = (Linf(0.1).random(x, SampleRNG.of_samples(0, range(64))) - x).flatten()
    assert abs(shift.mean()) < 0.002
    assert abs(shift.std() - 0.2 / 12**0.5) < 0.001


def test_l2_radius_is_spread():
    x = torch.full((200, 3, 8, 8), 0.5)
    radius = L2(1.0).size(L2(1.0).random(x, SampleRNG.of_samples(0, range(200))), x)
    assert abs(radius.mean() - 0.5) < 0.08
    assert radius.max() > 0.9


@pytest.mark.parametrize(
    ("norm", "eps", "said"),
    [("linf", 8, "8/255"), ("linf", -0.1, "negative"), ("l2", -1, "negative"), ("lp", 0.1, "linf, l2, l1")],
)
def test_senseless_budgets_are_refused(norm, eps, said):
    with pytest.raises(UserError, match=said):
        make_threat(norm, eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("norm", "eps"), [("linf", 8 / 255), ("l2", 0.5), ("l1", 3.0)])
def test_coarse_types_stay_in_the_ball(dtype, norm, eps):
    x = images(20).to(dtype)
    ball = make_threat(norm, eps)
    rng = SampleRNG.of_samples(0, range(20))
    far = (x + rng.stream("far").normal(*x.shape[1:]).to(dtype)).to(dtype)
    for z in (ball.project(far, x), ball.random(x, rng), ball.random(x, rng, surface=True)):
        assert z.dtype == dtype
        assert ball.size(z, x).max() <= eps + 1e-6
        assert z.min() >= 0
        assert z.max() <= 1
    assert ball.size(ball.project(far, x), x).min() > 0.8 * eps  # not by giving the budget away
