"""The contract of attacks for those that need a model with patches, also on models of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import vitadel
from other_vits import OTHERS, last_layer, make_other, one_of_each_family
from vitadel.attacks.patches.learned_patches import LearnedPatches
from vitadel.attacks.patches.patch_fool import patch_fool
from vitadel.attacks.patches.random_patches import RandomPatches
from vitadel.attacks.settings import settings_of
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.backbones.anatomy import blocks_of
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack
from vits import make_vit, pixels

BALL = Linf(8 / 255)


def _learned(ball, model, **settings) -> Attack:
    x = pixels("vit", 4, seed=30)
    return LearnedPatches(ball, training_steps=2, masks=3, **settings).prepared(model, [(x, torch.zeros(4).long())])


ATTACKS = {
    "random": lambda ball, model: RandomPatches(ball, masks=3),
    "fool": lambda ball, model: patch_fool(ball, patches=2, steps=4),
    "fool saliency": lambda ball, model: patch_fool(ball, steps=4, select="saliency"),
    "fool random paper": lambda ball, model: patch_fool(ball, patches=3, steps=4, select="random", paper=True),
    "learned": _learned,
    "learned ce paper": lambda ball, model: _learned(ball, model, objective="ce", paper=True),
}
BY_ATTENTION = ("fool", "linf", "l2")  # choose patches by the attention between them, which windows do not have
MILD = {
    "linf": lambda ball, model: patch_fool(Linf(ball.eps), patches=2, steps=4, mild="linf"),
    "l2": lambda ball, model: patch_fool(L2(ball.eps), patches=2, steps=4, mild="l2"),
}
BUILDS = {**ATTACKS, **MILD}
_TURNS = count()
MET: list[tuple[str, str]] = []  # attack and model of the other libraries


def everything(test: Callable[..., None]) -> Callable[..., None]:
    """Meet all attacks on a model of our own, and on each fourth family of other libraries the attack met least."""
    turn, cases = next(_TURNS), [pytest.param(build, "", id=name) for name, build in BUILDS.items()]
    for library in one_of_each_family(turn // 4)[turn % 4 :: 4]:
        names = [name for name in BUILDS if not OTHERS[library].windows or name not in BY_ATTENTION]
        name = min(names, key=[met for met, _ in MET].count)
        cases.append(pytest.param(BUILDS[name], library, id=f"{name} {library}"))
        MET.append((name, library))
    return pytest.mark.parametrize(("build", "library"), cases)(test)


def vit(library: str = "", classes: int = 5) -> nn.Module:
    if library:
        return vitadel.wrap(make_other(library, classes).float())
    return make_vit("vit", classes=classes, depth=4)


def batch(model: nn.Module, count: int = 5) -> tuple[Tensor, Tensor]:
    x = pixels("vit", count)
    x[:, :, :2] = 0.0
    x[:, :, -2:] = 1.0
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % 5  # one label is wrong from the start
    return x, y


@everything
def test_stays_in_shape_box_and_budget(build, library):
    model = vit(library)
    x, y = batch(model)
    attack = build(BALL, model)
    for dtype in (torch.float32, torch.float64):
        inputs = x.to(dtype)
        z = attack(model.to(dtype), inputs, y)
        assert z.shape == x.shape
        assert z.dtype == dtype
        assert not z.requires_grad
        assert not judge(model, attack.rules(model, inputs), inputs, z, y).void.any()


@everything
def test_leaves_no_trace(build, library):
    model = vit(library)
    attack = build(BALL, model)
    x, y = batch(model)
    model.train()
    blocks_of(model)[1].module.eval()  # mixed modes must survive
    next(model.parameters()).requires_grad_(False)
    parameters = [p.clone() for p in model.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    x_before, rng = x.clone(), torch.get_rng_state()
    attack(model, x, y)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())


@pytest.mark.slow
@everything
def test_depends_on_seed_and_sample_only(build, library):
    model = vit(library)
    attack = build(BALL, model)
    x, y = batch(model)
    model, x = model.double(), x.double()
    rng = SampleRNG.of_samples(3, range(len(x)))
    whole = attack(model, x, y, rng)
    assert torch.equal(whole, attack(model, x, y, rng))
    each = [torch.tensor([i]) for i in range(len(x))]
    assert torch.allclose(whole, torch.cat([attack(model, x[i], y[i], rng[i]) for i in each]), atol=1e-5)
    assert not torch.equal(whole, attack(model, x, y, SampleRNG.of_samples(4, range(len(x)))))
    unkeyed = attack(model, x, y)
    assert torch.allclose(unkeyed, torch.cat([attack(model, x[:2], y[:2]), attack(model, x[2:], y[2:])]), atol=1e-5)
    odd = x.contiguous(memory_format=torch.channels_last)
    assert torch.allclose(attack(model, odd, y, rng), whole, atol=1e-5)


@everything
def test_no_budget_means_no_change(build, library):
    model = vit(library)
    x, y = batch(model)
    assert torch.equal(build(Linf(0.0), model)(model, x, y), x)


@everything
def test_works_under_autocast(build, library):
    model = vit(library)
    attack = build(BALL, model)
    x, y = batch(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = attack(model, x, y)
        rules = attack.rules(model, x)
    assert z.dtype == x.dtype
    assert z.isfinite().all()
    assert (rules.size(z, x) <= rules.eps).all()


@everything
@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_work(build, library, classes):
    model = vit(library, classes)
    x = pixels("vit", 3)
    assert build(BALL, model)(model, x, model(x).argmax(1)).isfinite().all()


@everything
def test_odd_inputs_are_refused(build, library):
    model = vit(library)
    attack = build(BALL, model)
    x, y = batch(model)
    with pytest.raises(UserError, match=r"pixels in \[0, 1\]"):
        attack(model, x * 255, y)
    with pytest.raises(UserError, match="images of shape"):
        attack(model, x[0], y)


@pytest.mark.slow
@everything
def test_constant_logits_and_vanished_attention_give_no_nan(build, library):
    model = vit(library)
    attack = build(BALL, model)
    x, y = batch(model)
    with torch.no_grad():
        last_layer(model).weight.zero_()
        for name, weight in model.named_parameters():
            if any(part in name for part in ("qkv.weight", "q_proj.weight", "in_proj_weight")):
                weight.mul_(100)  # attention on one token only
    assert attack(model, x, y).isfinite().all()


@everything
def test_costs_what_it_says_when_nothing_is_fooled(build, library):
    model = vit(library)
    with torch.no_grad():
        last_layer(model).bias[0] += 1e4
    attack = build(BALL, model)
    x, _ = batch(model)
    with count_passes(model) as cost:
        attack(model, x, torch.zeros(5, dtype=torch.long))
    gradients, forwards = attack.passes()
    assert (cost.gradients, cost.forwards) == (5 * gradients, 5 * forwards)


@pytest.mark.parametrize("ball", [Linf(0.03), L2(0.5), L1(3.0)])
def test_the_given_norm_does_not_matter(ball):
    model = vit()
    x, y = batch(model)
    for build in ATTACKS.values():
        assert torch.equal(build(ball, model)(model, x, y), build(BALL, model)(model, x, y))


def test_settings_are_recorded():
    settings = settings_of(patch_fool(BALL, patches=3))
    assert (settings["patches"], settings["select"], settings["mild"], settings["rate"]) == (
        3,
        "attention",
        "none",
        0.2,
    )
    assert settings_of(RandomPatches(BALL))["share"] == 0.1
    assert settings_of(LearnedPatches(BALL))["objective"] == "features"


def test_every_attack_meets_another_library_and_every_family_an_attack():
    assert {name for name, _ in MET} == set(BUILDS)
    assert {OTHERS[library].family for _, library in MET} == {other.family for other in OTHERS.values()}
