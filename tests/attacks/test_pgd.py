"""PGD where the answer is known."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf, Restarts, make
from vitadel.attacks.losses import cross_entropy, margin
from vitadel.attacks.steppers import Steepest, usual_length
from vitadel.attacks.threats import L2
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.selftest import LinearToy
from vitadel.runtime.rng import SampleRNG


def linear_toy() -> tuple[LinearToy, torch.Tensor, torch.Tensor]:
    weight = SampleRNG.of_samples(0, [0]).normal(3 * 64)[0]
    x = 0.5 + 0.2 * (images(20) - 0.5)
    toy = LinearToy(weight, -0.5 * float(weight.sum()))
    return toy, x, toy(x).argmax(1)


def test_fgsm_is_the_formula():
    model, x = TinyNet().eval(), images(6)
    y = model(x).argmax(1)
    leaf = x.clone().requires_grad_()
    grad = torch.autograd.grad(torch.nn.functional.cross_entropy(model(leaf), y, reduction="sum"), leaf)[0]
    z = PGD(Linf(0.03), stepper=Steepest(0.03), steps=1, random_start=False)(model, x, y)
    assert torch.equal(z, (x + 0.03 * grad.sign()).clamp(x - 0.03, x + 0.03).clamp(0, 1))


def test_flips_exactly_above_the_distance():
    toy, x, y = linear_toy()
    distance = toy.distance(x, "linf")
    for eps in (0.0005, 0.001, 0.002, 0.004, 0.008):
        fooled = toy(PGD(Linf(eps), steps=30)(toy, x, y)).argmax(1) != y
        clear = (distance / eps - 1).abs() > 0.01
        assert torch.equal(fooled[clear], (distance < eps)[clear])
    assert int((distance < 0.008).sum()) > 0


@pytest.mark.parametrize("eps", [0.3, 3.0, 40.0])
def test_fgsm_in_l1_is_the_best_point_of_ball_and_box(eps):
    """Of a linear function: pixels are filled up to black or white, the steepest first."""
    toy, _, _ = linear_toy()
    x = images(6)
    y = toy(x).argmax(1)
    z = dataclasses.replace(make("fgsm", eps=eps, norm="l1"), stop_when_fooled=False)(toy, x, y)
    away = 1.0 - 2.0 * y.float()
    weight = toy.weight.detach()
    for image, best, sign in zip(x.flatten(1), z.flatten(1), away, strict=True):
        expected, left = image.clone(), eps
        for pixel in weight.abs().argsort(descending=True).tolist():
            wall = float(sign * weight[pixel] > 0)
            step = min(left, abs(wall - float(image[pixel])))
            expected[pixel] += step if wall else -step
            left -= step
        assert torch.allclose(best, expected, atol=1e-5)


def test_steps_make_the_loss_grow_on_a_concave_path():
    model, x = TinyNet().eval(), images(12)
    y = model(x).argmax(1)
    losses = [
        cross_entropy(model(PGD(L2(0.3), steps=k, random_start=False, stop_when_fooled=False)(model, x, y)), y).mean()
        for k in (1, 4, 16)
    ]
    assert losses[0] < losses[1] < losses[2]


def test_fooled_samples_leave_the_search_and_stay_fooled():
    model, x = TinyNet().eval(), images(40)
    y = model(x).argmax(1)
    y[:10] = (y[:10] + 1) % 3  # wrong from the start: known after one look, without a step
    with count_passes(model) as cost:
        z = PGD(Linf(0.02), steps=25, random_start=False)(model, x, y)
    assert torch.equal(z[:10], x[:10])
    held = int((margin(model(z), y) <= 0).sum())
    assert 0 < held < 30
    assert cost.gradients < 25 * 30 + 10
    with count_passes(model) as full:
        last = PGD(Linf(0.02), steps=25, random_start=False, stop_when_fooled=False)(model, x, y)
    assert full.gradients == 25 * 40
    assert full.forwards == 0
    assert held <= int((margin(model(last), y) <= 0).sum())


def test_everything_fooled_ends_the_search_at_once():
    model, x = TinyNet().eval(), images(5)
    y = (model(x).argmax(1) + 1) % 3
    with count_passes(model) as cost:
        PGD(Linf(0.02), steps=50, random_start=False)(model, x, y)
    assert (cost.gradients, cost.forwards) == (0, 5)


def test_restarts_only_help_and_only_retry_what_held():
    model, x = TinyNet().eval(), images(300)
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(300))
    once = PGD(Linf(0.05), stepper=Steepest(0.01), steps=1)
    with count_passes(model) as one:
        first_try = Restarts(once, 1)(model, x, y, rng)
    first = margin(model(first_try), y) > 0
    with count_passes(model) as many:
        five_tries = Restarts(once, 5)(model, x, y, rng)
    all_five = margin(model(five_tries), y) > 0
    assert (all_five | ~first).all()
    assert int(all_five.sum()) > int(first.sum())
    assert many.gradients < 5 * one.gradients


def test_usual_step_can_cross_a_large_ball():
    assert usual_length(Linf(8 / 255), 100) == pytest.approx(2 / 255)
    assert usual_length(Linf(1 / 255), 20) == pytest.approx(0.25 / 255)
    assert usual_length(Linf(105 / 255), 20) * 20 >= 2 * 105 / 255
    assert usual_length(L2(0.5), 10) == pytest.approx(0.125)


@pytest.mark.parametrize("build", [lambda: PGD(Linf(0.1), steps=0), lambda: Restarts(PGD(Linf(0.1)), 0)])
def test_no_steps_and_no_restarts_are_refused(build):
    with pytest.raises(UserError, match="at least 1"):
        build()


def test_soft_labels_have_a_cross_entropy():
    logits, soft = torch.randn(4, 3), torch.softmax(torch.randn(4, 3), 1)
    assert torch.allclose(cross_entropy(logits, soft), -(soft * logits.log_softmax(1)).sum(1))
