"""Losses, goals and steppers against the formulas of their papers."""

from __future__ import annotations

import pytest
import torch

from toys import TinyNet, images
from vitadel.attacks import Linf, make
from vitadel.attacks.goals import Gama, OnLogits, clearly_fooled, gradient
from vitadel.attacks.losses import cross_entropy, dlr, floored_margin, margin, rescaled_cross_entropy, targeted_dlr
from vitadel.attacks.steppers import Dropping, Fading, Momentum, Steepest
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes

LOGITS = torch.tensor([[3.0, 1.0, 0.5, -2.0], [0.2, 0.9, 0.1, 0.8], [-1.0, -1.5, 4.0, 2.0]])
LABELS = torch.tensor([0, 3, 1])


def test_margin_is_positive_exactly_when_wrong():
    assert torch.allclose(margin(LOGITS, LABELS), torch.tensor([-2.0, 0.1, 5.5]))
    assert torch.equal(margin(LOGITS, LABELS) > 0, LOGITS.argmax(1) != LABELS)


def test_a_floor_hides_what_the_label_leads_by():
    """The gradient is zero where the label leads by more than kappa, so kappa is off by default."""
    logits = LOGITS.clone().requires_grad_()
    value = floored_margin(logits, LABELS, kappa=1.5)
    assert torch.allclose(value, torch.tensor([-1.5, 0.1, 5.5]))
    slope = gradient(value, logits)
    assert slope[0].abs().max() == 0
    assert (slope[1:].abs().amax(1) == 1).all()


def test_dlr_by_hand():
    assert torch.allclose(dlr(LOGITS, LABELS), torch.tensor([-2.0 / 2.5, 0.1 / 0.7, 5.5 / 5.0]))
    target = torch.tensor([1, 1, 2])
    expected = torch.tensor([-2.0 / (3 + 0.75), 0.1 / (0.9 - 0.15), 5.5 / (4 + 1.25)])
    assert torch.allclose(targeted_dlr(LOGITS, LABELS, target), expected)


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_dlr_is_blind_to_shift_and_scale(classes):
    logits = torch.randn(20, classes, generator=torch.Generator().manual_seed(0)).double()
    y = torch.arange(20) % classes
    target = (y + 1) % classes
    for moved in (logits + 7, logits * 1000, logits * 0.01 - 3):
        assert torch.allclose(dlr(moved, y), dlr(logits, y))
        assert torch.allclose(targeted_dlr(moved, y, target), targeted_dlr(logits, y, target))


def test_two_classes_fall_back_to_the_margin():
    logits, y = torch.tensor([[2.0, 5.0]]), torch.tensor([0])
    assert dlr(logits, y).item() == targeted_dlr(logits, y, 1 - y).item() == 3.0


def test_rescaled_cross_entropy_sees_what_large_logits_hide():
    logits = (LOGITS[:1] * 1000).requires_grad_()
    y = LABELS[:1]
    plain = gradient(cross_entropy(logits, y), logits)
    assert plain.abs().max() == 0
    rescaled = gradient(rescaled_cross_entropy(logits, y), logits)
    assert rescaled.abs().max() > 0
    by_hand = torch.softmax(LOGITS[:1] * 10 / 2.0, 1) - torch.tensor([[1.0, 0, 0, 0]])
    assert torch.allclose(rescaled, by_hand * 10 / 2000.0)
    assert rescaled_cross_entropy(torch.zeros(1, 3), torch.tensor([1])).isfinite().all()


def test_gamas_weight_falls_from_fifty_to_nothing_in_a_quarter():
    model, x = TinyNet().eval(), images(3)
    y = model(x).argmax(1)
    aim, z = Gama()(model, x, y), images(3, seed=1)
    with torch.no_grad():
        p, guide = model(z).softmax(1), model(x).softmax(1)
    away = (p - guide).square().sum(1)
    for turn in range(100):
        weight = 50 - 2 * turn if turn < 25 else 0
        value, _ = aim.evaluate(z, turn / 100)
        assert torch.allclose(value, margin(p, y) + weight * away, atol=1e-5)
    kept = aim.keep(torch.tensor([True, False, True]))
    assert torch.equal(kept.evaluate(z[[0, 2]], 0.0)[0], aim.evaluate(z, 0.0)[0][[0, 2]])


def test_gama_steps_drop_by_ten_at_sixty_and_eighty_five():
    lengths = Dropping().start(Linf(8 / 255), 100, images(1)).lengths
    assert [round(length * 255, 6) for length in lengths] == [16.0] * 60 + [1.6] * 25 + [0.16] * 15


def test_gama_starts_in_a_corner_and_takes_one_forward_more():
    model, x = TinyNet().eval(), torch.full((4, 3, 8, 8), 0.5)
    y = model(x).argmax(1)
    start = Linf(0.1).random(x, _rng(4), surface=True)
    assert torch.allclose((start - x).abs(), torch.full_like(x, 0.1))
    with count_passes(model) as cost:
        make("gama-5", eps=1e-6)(model, x, y)
    assert (cost.gradients, cost.forwards) == (20, 4)


def _rng(count):
    from vitadel.runtime.rng import SampleRNG

    return SampleRNG.of_samples(0, range(count))


def test_momentum_sums_normalized_gradients():
    x = torch.full((2, 3, 2, 2), 0.5)
    step = Momentum(decay=0.5).start(Linf(0.1), 10, x)
    first = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    second = -0.4 * first * torch.tensor([1.0, 3.0]).view(2, 1, 1, 1)
    assert torch.allclose(step.move(x, first, 0), x + 0.01 * first.sign())
    # Normalized, the second gradient weighs 1 against a memory of 0.5: it turns the direction round.
    assert torch.allclose(step.move(x, second, 1), x - 0.01 * first.sign())
    assert len(step.keep(torch.tensor([True, False])).memory) == 1


def test_steps_of_one_length_are_the_same_on_every_turn_of_however_many():
    x, grad = torch.full((1, 3, 2, 2), 0.5), torch.ones(1, 3, 2, 2)
    step = Steepest(0.01).start(Linf(0.1), 10**20, x)
    for turn in (0, 10**20 - 1):
        assert torch.allclose(step.move(x, grad, turn), x + 0.01)


def test_fading_is_apgds_momentum_with_a_linear_step():
    x = torch.full((1, 3, 2, 2), 0.5)
    step, grad = Fading().start(Linf(0.1), 4, x), torch.ones(1, 3, 2, 2)
    first = step.move(x, grad, 0)
    assert torch.allclose(first, x + 0.1)  # 0.2 cut to the ball
    second = step.move(first, -grad, 1)
    ahead = first - 0.15
    assert torch.allclose(second, first + 0.75 * (ahead - first) + 0.25 * (first - x))
    assert step.lengths == pytest.approx((0.2, 0.15, 0.1, 0.05))


def test_on_logits_returns_value_and_success():
    model, x = TinyNet().eval(), images(5)
    y = torch.tensor([0, 1, 2, 0, 1])
    value, fooled = OnLogits(margin)(model, x, y).evaluate(x, 0.0)
    assert torch.equal(fooled, value > 1e-5 * model(x).abs().amax(1))
    assert torch.equal(clearly_fooled(LOGITS, LABELS), torch.tensor([False, True, True]))


@pytest.mark.parametrize("name", ["cw-30", "dlr-30", "mifpe-30"])
def test_losses_that_large_logits_do_not_blind(name):
    class Loud(TinyNet):
        def forward(self, x):
            return super().forward(x) * 1e4

    model, x = Loud().eval(), images(30)
    y = model(x).argmax(1)

    def held(attack):
        return int((model(make(attack, eps=0.05)(model, x, y)).argmax(1) == y).sum())

    assert held(name) < held("pgd-30(random_start=false)")


def test_gama_can_be_guided_by_the_start_as_in_the_released_code():
    model, x = TinyNet(4).eval(), images(3)
    y = model(x).argmax(1)
    aim = Gama(guide="init")(model, x, y)
    start = (x + 0.05).clamp(0, 1)
    first, _ = aim.evaluate(start, 0.0)
    probabilities = model(start).softmax(1)
    assert torch.allclose(first, margin(probabilities, y))  # nothing to be pulled from yet
    second, _ = aim.evaluate(x, 0.1)
    pulled = margin(model(x).softmax(1), y) + 50 * 0.6 * (model(x).softmax(1) - probabilities).square().sum(1)
    assert torch.allclose(second, pulled)
    with pytest.raises(UserError, match="clean, init"):
        Gama(guide="noise")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [cross_entropy, margin, dlr, rescaled_cross_entropy])
def test_losses_of_coarse_logits_are_those_of_the_same_numbers(dtype, loss):
    """A sure answer and a tie: in half precision one has no slope at its label, the other divides zero by zero."""
    coarse = torch.tensor([[9.0, 1.0, 0.5, -2.0], [2.0, 2.0, 2.0, 2.0]], dtype=dtype)
    y = torch.tensor([0, 1])
    leaf, exact = coarse.clone().requires_grad_(), coarse.float().requires_grad_()
    assert torch.equal(loss(leaf, y), loss(exact, y))
    slope = torch.autograd.grad(loss(leaf, y)[0], leaf)[0]
    assert torch.equal(slope, torch.autograd.grad(loss(exact, y)[0], exact)[0].to(dtype))
    assert slope[0, 0] < 0
    target = torch.tensor([1, 0])
    assert torch.equal(targeted_dlr(coarse, y, target), targeted_dlr(coarse.float(), y, target))
