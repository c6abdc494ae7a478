"""The attack inside TRADES where the answer is known."""

from __future__ import annotations

import pytest
import torch

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf, Restarts, make
from vitadel.attacks.goals import FromClean, gradient
from vitadel.attacks.losses import hard_labels, kl_divergence, lead, likeliest_wrong, margin, probability_margin
from vitadel.attacks.registry import kl
from vitadel.attacks.settings import training_form
from vitadel.attacks.steppers import Steepest
from vitadel.attacks.threats import L1, L2
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG


def toy() -> tuple[TinyNet, torch.Tensor, torch.Tensor]:
    model, x = TinyNet().eval(), images(8)
    return model, x, model(x).argmax(1)


def test_divergence_by_hand():
    clean, other = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    by_hand = [0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(2 / 3)), 0.0]
    assert kl_divergence(clean.log(), other.log() + 3).tolist() == pytest.approx([float(v) for v in by_hand], abs=1e-6)


def test_value_is_the_divergence_from_the_clean_answer_which_stands_first():
    model, x, y = toy()
    z = Linf(0.1).random(x, SampleRNG.of_samples(0, range(8)))
    value, fooled = FromClean()(model, x, y).evaluate(z, 0.0)
    p, q = (model(each).double().softmax(1) for each in (x, z))
    assert torch.allclose(value.double(), (p * (p / q).log()).sum(1), atol=1e-5)
    assert not torch.allclose(value.double(), (q * (q / p).log()).sum(1), atol=1e-5)
    assert torch.equal(fooled, margin(model(z), y) > 0)


def test_no_slope_at_the_clean_image_and_a_slope_beside_it():
    model, x, y = toy()
    model, x = model.double(), x.double()
    aim = FromClean()(model, x, y)

    def slope(at):
        at = at.clone().requires_grad_()
        return gradient(aim.evaluate(at, 0.0)[0], at)

    assert slope(x).abs().max() < 1e-12
    assert slope(x + 0.01).abs().amax((1, 2, 3)).min() > 1e-4


def test_kept_samples_keep_their_clean_answers():
    model, x, y = toy()
    aim, z = FromClean()(model, x, y), images(8, seed=3)
    kept = torch.tensor([1, 4])
    assert torch.allclose(aim.keep(kept).evaluate(z[kept], 0.0)[0], aim.evaluate(z, 0.0)[0][kept], atol=1e-6)


def test_the_clean_answer_is_computed_once():
    model, x, y = toy()
    attack = training_form(kl(Linf(0.03), steps=7))
    with count_passes(model) as cost:
        attack(model, x, y)
    assert attack.passes() == (7, 1)
    assert (cost.gradients, cost.forwards) == (7 * 8, 8)


def test_one_step_by_hand():
    model, x, y = toy()
    rng = SampleRNG.of_samples(4, range(8))
    start = (x + 0.001 * rng.stream("start").normal(3, 8, 8)).clamp(x - 0.03, x + 0.03).clamp(0, 1).requires_grad_()
    with torch.no_grad():
        clean = model(x).softmax(1)
    value = torch.nn.functional.kl_div(model(start).log_softmax(1), clean, reduction="sum")
    grad = torch.autograd.grad(value, start)[0]
    by_hand = (start.detach() + 0.01 * grad.sign()).clamp(x - 0.03, x + 0.03).clamp(0, 1)
    z = training_form(kl(Linf(0.03), steps=1, step=0.01))(model, x, y, rng)
    assert (z != by_hand).float().mean() < 0.01  # a sign may turn where the slope is rounding
    assert not torch.equal(z, x)


def test_many_steps_lead_far_away():
    model, x, y = toy()

    def away(steps):
        z = training_form(kl(Linf(0.05), steps=steps))(model, x, y, SampleRNG.of_samples(0, range(8)))
        return kl_divergence(model(x), model(z)).mean().item()

    noise = Linf(0.05).random(x, SampleRNG.of_samples(1, range(8)))
    assert away(20) > away(1)
    assert away(20) > 10 * kl_divergence(model(x), model(noise)).mean().item()


@pytest.mark.parametrize("threat", [Linf(0.0005), L2(0.005), L1(0.02)])
def test_noise_larger_than_the_ball_is_cut_to_it(threat):
    x = images(5)
    z = PGD(threat, start_noise=0.1)._start(x, SampleRNG.of_samples(0, range(5)))
    assert (threat.size(z, x) <= threat.eps + 1e-6).all()
    assert (threat.size(z, x) > 0.5 * threat.eps).all()
    assert z.min() >= 0
    assert z.max() <= 1


def test_the_start_is_normal_noise_of_that_size():
    x = torch.full((20, 3, 8, 8), 0.5)
    noise = (PGD(Linf(0.1), start_noise=0.001)._start(x, SampleRNG.of_samples(0, range(20))) - x) / 0.001
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert noise.mean().item() == pytest.approx(0, abs=0.05)
    assert noise.abs().max() > 3


def test_settings_of_the_name():
    assert make("kl-5(step=2/255,noise=0.01)", eps=0.03) == PGD(
        Linf(0.03), FromClean(), Steepest(2 / 255), 5, start_noise=0.01
    )
    assert kl(Linf(0.03), noise=0) == PGD(Linf(0.03), FromClean(), Steepest(0.03 / 4), 10)
    assert kl(Linf(0.03), restarts=3) == Restarts(kl(Linf(0.03)), 3)
    with pytest.raises(UserError, match="start_noise must be positive, got -1"):
        PGD(Linf(0.03), start_noise=-1.0)


def test_labels_as_probabilities():
    soft, hard = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.1, 0.4]]), torch.tensor([1, 0])
    logits = torch.tensor([[3.0, 1.0, -1.0], [0.5, 0.4, 0.3]])
    assert torch.equal(hard_labels(soft), hard)
    assert hard_labels(hard) is hard
    target = torch.tensor([2, 2])
    for loss in (margin, likeliest_wrong, probability_margin):
        assert torch.equal(loss(logits, soft), loss(logits, hard))
    assert torch.equal(lead(logits, soft, target), lead(logits, hard, target))
    for part in ("label", "rival"):
        assert torch.equal(probability_margin(logits, soft, part), probability_margin(logits, hard, part))
