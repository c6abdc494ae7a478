"""The feature-space attack: cosines by hand, a floor under the PSNR, whole gray levels."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitadel.attacks.features import AwayFromFeatures, FeatureAttack, effective_eps, features
from vitadel.attacks.goals import clearly_fooled
from vitadel.attacks.parse import make
from vitadel.attacks.pgd import PGD
from vitadel.attacks.threats import L2, Linf
from vitadel.errors import UserError
from vitadel.instrument import block_features
from vitadel.runtime.rng import SampleRNG
from vits import VITS, make_vit, pixels, precise_vit

EPS = 8 / 255
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def cosine(goal: AwayFromFeatures, model: Any, x: Tensor, z: Tensor) -> Tensor:
    """By the goal itself, without the image term; one per sample."""
    aim = AwayFromFeatures(goal.axis, 0.0, goal.blocks, goal.normed)(model, x, torch.zeros(len(x), dtype=torch.long))
    with torch.no_grad():
        return -aim.evaluate(z, 0.0)[0]


def psnr(z: Tensor, x: Tensor) -> Tensor:
    return -10 * (z.double() - x.double()).square().flatten(1).mean(1).log10()


def eight_bit(name: str, batch: int) -> Tensor:
    return (pixels(name, batch) * 255).round() / 255


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("normed", [True, False])
def test_the_value_equals_a_computation_by_hand(axis: str, normed: bool) -> None:
    model, x = precise_vit("dinov2_registers")
    net: Any = model
    z = Linf(0.1).random(x, SampleRNG.of_samples(0, range(2)))
    with block_features(model) as seen:
        model(x)
        clean = list(seen)
        model(z)
    total = torch.zeros(2, dtype=torch.float64)
    for here, there in zip(seen, clean, strict=True):
        here, there = (net.norm(each) if normed else each for each in (here, there))
        here, there = (each[:, [0, *range(5, 21)]] for each in (here, there))  # class token and patches, no registers
        dim = -1 if axis == "token" else 1
        alike = (here * there).sum(dim) / (here.square().sum(dim) * there.square().sum(dim)).sqrt()
        total += alike.mean(1) / 2
    change = (z - x).square().mean((1, 2, 3))
    aim = AwayFromFeatures(axis, 3.0, (0, 1), normed)(model, x, torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(aim.evaluate(z, 0.5)[0], -total - 3 * change, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", VITS)
def test_the_clean_image_has_cosine_one_and_the_attack_lowers_it(name: str) -> None:
    model, x = make_vit(name), pixels(name)
    goal = AwayFromFeatures()
    torch.testing.assert_close(cosine(goal, model, x, x), torch.ones(2))
    few, many = (features(Linf(EPS), k, stop_when_fooled=False)(model, x, torch.tensor([0, 1])) for k in (1, 6))
    noise = Linf(EPS).random(x, SampleRNG.of_samples(0, range(2)))
    assert (cosine(goal, model, x, many) < cosine(goal, model, x, noise)).all()
    assert (cosine(goal, model, x, many) < cosine(goal, model, x, few)).all()


def test_labels_matter_for_leaving_only() -> None:
    model, x = make_vit("vit"), pixels("vit")
    y = model(x).argmax(1)
    attack = features(Linf(EPS), 5, stop_when_fooled=False)
    rng = SampleRNG.of_samples(0, range(2))
    assert torch.equal(attack(model, x, y, rng), attack(model, x, (y + 1) % 5, rng))
    start = features(Linf(EPS), 5, 2 / 255)(model, x, (y + 1) % 5, rng)  # fooled at once: the start is all there is
    noise = rng.stream("start").stream("gaussian start").normal(3, 32, 32)
    torch.testing.assert_close(start, (x + (2 / 255 * noise).clamp(-EPS, EPS)).clamp(0, 1))


def test_in_other_norms_the_start_is_as_long_as_a_step() -> None:
    model, x = make_vit("vit"), pixels("vit").clamp(0.2, 0.8)
    start = features(L2(1.0), 5, step=0.3)(model, x, (model(x).argmax(1) + 1) % 5)
    torch.testing.assert_close(L2(1.0).size(start, x), torch.full((2,), 0.3, dtype=torch.float64))


def test_the_goal_serves_any_search() -> None:
    model, x = make_vit("vit"), pixels("vit")
    goal = AwayFromFeatures(blocks=(0, -1))
    z = PGD(Linf(EPS), goal, steps=8, stop_when_fooled=False)(model, x, torch.tensor([0, 0]))
    assert (cosine(goal, model, x, z) < 0.95).all()


@pytest.mark.parametrize("threat", [Linf(EPS), L2(3.0)], ids=["linf", "l2"])
@pytest.mark.parametrize("quantize", [True, False])
def test_the_psnr_floor_holds_for_each_image(threat: Any, quantize: bool) -> None:
    model, x = make_vit("vit"), eight_bit("vit", 6)
    x[0] = 0.0  # here half of every sign step is cut off by the box
    x[1, :, 8:] = 1.0
    y = model(x).argmax(1)
    loose = features(threat, 10, stop_when_fooled=False)(model, x, y)
    assert (psnr(loose, x)[2:] < 35).all()
    z = features(threat, 10, psnr=40.0, quantize=quantize, stop_when_fooled=False)(model, x, y)
    assert (psnr(z, x) >= 40).all()
    assert quantize or (psnr(z, x)[2:] < 40.001).all()  # the floor binds, so it is reached
    assert threat.size(z, x).max() <= threat.eps + 1e-6


@pytest.mark.parametrize("eps", [8 / 255, 0.03, 1.5 / 255])
@pytest.mark.parametrize("stop", [True, False])
def test_quantized_proposals_are_whole_levels_inside_the_budget(eps: float, stop: bool) -> None:
    model, x = make_vit("vit"), eight_bit("vit", 6)
    y = model(x).argmax(1)
    z = features(Linf(eps), 8, quantize=True, stop_when_fooled=stop)(model, x, y)
    levels = (z - x) * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-4)
    assert levels.abs().round().max() == int(
        eps * 255 + 1e-6
    )  # the outermost whole level is kept, not lost to rounding
    torch.testing.assert_close(z * 255, (z * 255).round(), rtol=0, atol=1e-4)
    assert z.min() >= 0
    assert z.max() <= 1


def test_quantizing_is_towards_zero() -> None:
    attack = FeatureAttack(Linf(EPS), quantize=True)
    x = torch.full((1, 3, 1, 2), 100 / 255)
    z = x + torch.tensor([[1.8, -1.8], [0.99, -0.99], [8.0, -8.0]]).view(1, 3, 1, 2) / 255
    levels = ((attack._proposal(z, x) - x) * 255).flatten()
    torch.testing.assert_close(levels, torch.tensor([1.0, -1.0, 0.0, 0.0, 8.0, -8.0]), rtol=0, atol=1e-4)
    paper = FeatureAttack(Linf(EPS), paper=True)
    levels = ((paper._proposal(z, x) - x) * 255).flatten()
    torch.testing.assert_close(levels, torch.tensor([1.0, -2.0, 0.0, -1.0, 8.0, -8.0]), rtol=0, atol=1e-4)


def test_who_leaves_quantized_is_fooled_by_the_quantized_image() -> None:
    model, x = make_vit("vit"), eight_bit("vit", 24)
    y = model(x).argmax(1)
    attack = features(Linf(EPS), 12, step=1 / 255, quantize=True)
    goes_on = features(Linf(EPS), 12, step=1 / 255, quantize=True, stop_when_fooled=False)
    with torch.no_grad():
        z, end = attack(model, x, y), goes_on(model, x, y)
        left = (z != end).flatten(1).any(1)
        assert left.any()
        assert clearly_fooled(model(z), y)[left].all()


def test_the_papers_numbers() -> None:
    model, x = make_vit("vit"), eight_bit("vit", 4).clamp(4 / 255, 251 / 255)
    y = model(x).argmax(1)
    attack: Any = features(Linf(EPS), paper=True, stop_when_fooled=False)
    assert (attack.goal.axis, attack.goal.normed, attack.goal.weight, attack.steps) == ("channel", True, 1.0, 30)
    levels = ((attack(model, x, y) - x) * 255).round()
    assert set(levels.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0}  # 1.8 levels, floored
    unrounded = copy.copy(attack)
    object.__setattr__(unrounded, "_proposal", lambda z, _: z)
    moved = (unrounded(model, x, y) - x).abs().amax((0, 2, 3))
    torch.testing.assert_close(moved, 8 / 255 * STD.flatten(), rtol=1e-4, atol=0)
    assert (psnr(unrounded(model, x, y), x) > 42.9).all()
    one = FeatureAttack(Linf(EPS), attack.goal, 1, 0.01, paper=True, stop_when_fooled=False)
    object.__setattr__(one, "_proposal", lambda z, _: z)
    rng = SampleRNG.of_samples(0, range(4))
    noise = 0.01 * rng.stream("start").stream("gaussian start").normal(3, 32, 32)
    step = ((one(model, x, y, rng) - x) / STD - noise.clamp(-EPS, EPS)).abs()
    free = noise.abs() < 0.02  # where the step does not meet the budget
    torch.testing.assert_close(step[free], torch.full_like(step[free], 0.01), rtol=1e-3, atol=1e-5)


def test_the_released_attack_on_labels() -> None:
    """The same units, start and flooring on the cross-entropy, beside the image term, by hand for one step."""
    model, x = make_vit("vit"), eight_bit("vit", 4).clamp(4 / 255, 251 / 255)
    y = model(x).argmax(1)
    attack: Any = make("pgd-30(paper=true)", eps=EPS)
    assert (attack.steps, attack.length, attack.paper, attack.goal.weight) == (30, 0.01, True, 1.0)
    assert attack.effective_eps == effective_eps(EPS)
    levels = ((replace(attack, stop_when_fooled=False)(model, x, y) - x) * 255).round()
    assert set(levels.unique().tolist()) == {-2.0, -1.0, 0.0, 1.0}
    with torch.no_grad():
        z = attack(model, x, y)
        assert F.cross_entropy(model(z), y) > F.cross_entropy(model(x), y) + 0.05
    one = replace(attack, steps=1, stop_when_fooled=False)
    object.__setattr__(one, "_proposal", lambda z, _: z)
    rng = SampleRNG.of_samples(0, range(4))
    noise = 0.01 * rng.stream("start").stream("gaussian start").normal(3, 32, 32)
    start = (x + (noise * STD).clamp(-EPS * STD, EPS * STD)).clamp(0, 1).requires_grad_(True)
    gain = F.cross_entropy(model(start), y, reduction="sum") - (start - x).square().flatten(1).mean(1).sum()
    (grad,) = torch.autograd.grad(gain, start)
    by_hand = (start + 0.01 * STD * grad.sign()).clamp(x - EPS * STD, x + EPS * STD).clamp(0, 1).detach()
    sure = grad.abs() > 1e-6  # elsewhere rounding decides the sign
    torch.testing.assert_close(one(model, x, y, rng)[sure], by_hand[sure], rtol=0, atol=1e-6)


@pytest.mark.parametrize("more", ["step=1/255", "restarts=2", "random_start=false", "noise=0.1"])
def test_the_released_attack_on_labels_has_its_own_settings(more: str) -> None:
    with pytest.raises(UserError, match="paper=true sets step, start and restarts itself"):
        make(f"pgd-30(paper=true,{more})", eps=EPS)


def test_user_errors_are_refused() -> None:
    with pytest.raises(UserError, match="unknown axis 'tokens'; did you mean token"):
        features(Linf(EPS), axis="tokens")
    with pytest.raises(UserError, match="paper=true sets step, axis"):
        features(Linf(EPS), axis="channel", paper=True)
    with pytest.raises(UserError, match="Linf, got a threat in L2"):
        features(L2(1.0), paper=True)
    with pytest.raises(UserError, match="decibels"):
        features(Linf(EPS), psnr=-1.0)
    with pytest.raises(UserError, match="at least one block"):
        AwayFromFeatures(blocks=())
    y = torch.tensor([0, 1])
    with pytest.raises(UserError, match="features of 3 blocks were requested, but the model has 2"):
        features(Linf(EPS), blocks=3)(make_vit("vit"), pixels("vit"), y)
    with pytest.raises(UserError, match="class token alone"):
        features(Linf(EPS), axis="channel")(make_vit("cait"), pixels("cait"), y)
    with pytest.raises(UserError, match=r"width, 16; this model has one of width 32"):
        features(Linf(EPS), blocks=4, normed=True)(make_vit("swin"), pixels("swin"), y)
    with pytest.raises(UserError, match="this model has none"):
        features(Linf(EPS), normed=True)(make_vit("levit"), pixels("levit"), y)
