"""Attention random dropping and perturbation random masking: what the model is shown, and what gradients pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import timm
import torch
from torch import Tensor, nn
from training_toys import FakeTraining

from vitadel.attacks import PGD, Linf
from vitadel.attacks.goals import FromClean
from vitadel.attacks.settings import at_eps
from vitadel.attacks.steppers import Momentum, Steepest
from vitadel.attacks.threats import L2
from vitadel.attacks.wrappers import Restarts
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import ChangesAttack
from vitadel.training.loop import run_inner_attack
from vitadel.training.objectives.cross_entropy import Adversarial, Standard
from vitadel.training.plugins.random_dropping import (
    RandomDropping,
    _Dropping,
    _dropping_goal,
    _Reset,
    _reset_goal,
    _StepsFromReset,
)
from vits import make_vit, pixels

ATTACK = PGD(Linf(8 / 255), stepper=Steepest(2 / 255), steps=4, stop_when_fooled=False)
DRAWS = SampleRNG.of_samples(3, range(4))


def batch(family: str = "vit") -> tuple[Tensor, Tensor]:
    return pixels(family, 4), torch.arange(4)


def dropping_run(keep: float, model: nn.Module, **state: int) -> FakeTraining:
    """Epochs of 100 steps, of which 10 are the plug-in's default: step 1000 keeps all."""
    x, y = batch()
    return FakeTraining(model, [(x[:1], y[:1])], step=round(1000 * keep), steps_per_epoch=100, **state)


def changed(keep: float, model: nn.Module, attack: PGD = ATTACK, **settings: bool) -> PGD:
    return RandomDropping(**settings).change_attack(dropping_run(keep, model), attack)


def patches(z: Tensor) -> Tensor:
    """(images, 16 patches of 8 x 8 pixels, values)"""
    return z.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def test_the_keeping_probability_grows_with_every_step():
    model = make_vit("vit")
    plugin = RandomDropping(epochs=4)
    assert isinstance(plugin, ChangesAttack)
    run = FakeTraining(model, [batch()], steps_per_epoch=10)
    kept = []
    for run.step in (0, 1, 20, 39, 40, 400):
        made = plugin.change_attack(run, ATTACK)
        kept.append(run.logged["kept"])
        assert (made is ATTACK) == (run.step >= 40)
    assert kept == pytest.approx([0, 0.025, 0.5, 0.975, 1, 1])
    assert run.asked == [1]  # the grid of patches is looked up once


@pytest.mark.parametrize("attack", [ATTACK, replace(ATTACK, threat=L2(0.5), goal=FromClean(), stepper=Momentum())])
def test_keeping_all_is_plain_pgd_to_the_last_bit(attack):
    model = make_vit("vit")
    x, y = batch()
    dropping = _Dropping(SampleRNG.of_samples(0, [7]), 1.0, attack.steps)
    reset = _Reset(dropping, (4, 4))
    made = replace(
        attack,
        goal=_reset_goal(_dropping_goal(attack.goal, dropping), reset),
        stepper=_StepsFromReset(attack.stepper, reset),
    )
    assert torch.equal(made(model, x, y, DRAWS), attack(model, x, y, DRAWS))
    assert made.passes() == attack.passes()


def test_keeping_no_patch_is_one_step_from_the_clean_image():
    model = make_vit("vit")
    x, y = batch()
    one_step = replace(ATTACK, steps=1, random_start=False)
    made = changed(0, model, attention=False)
    assert torch.equal(made(model, x, y, DRAWS), one_step(model, x, y))


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9])
def test_some_patches_are_shown_clean_and_all_are_moved(keep):
    model = make_vit("vit")
    x, y = batch()
    seen: list[Tensor] = []
    made = changed(keep, model, attention=False)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    z = made(model, x, y, DRAWS)
    assert len(seen) == ATTACK.steps
    clean = [(patches(shown) == patches(x)).all(2) for shown in seen]
    for mask in clean:
        assert mask.sum(1).tolist() == [int(16 * (1 - keep))] * 4
        assert bool((mask == mask[0]).all())  # the same for all images
    if keep < 0.9:
        assert not all(torch.equal(mask, clean[0]) for mask in clean)  # and other ones at each step
    assert bool((patches(z) != patches(x)).any(2).all())
    # The last update, by hand: from where the model was shown to stand, in all patches.
    shown = seen[-1].requires_grad_()
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(shown), y), shown)
    torch.testing.assert_close(z, ATTACK.threat.project(shown.detach() + 2 / 255 * grad.sign(), x), rtol=0, atol=0)


def test_a_reset_lasts():
    """The perturbation that was taken off is gone: patches restart from the clean image, one step away from it."""
    model = make_vit("vit")
    x, y = batch()
    seen: list[Tensor] = []
    made = changed(0.5, model, attention=False)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    made(model, x, y, DRAWS)
    size = [(patches(shown) - patches(x)).abs().amax(2) for shown in seen]
    for before, after in pairwise(size):
        fresh = (before == 0) & (after > 0)
        assert bool(fresh.any())
        assert float(after[fresh].max()) <= 2 / 255 + 1e-7


def pooled_vit() -> nn.Module:
    """Without a class token, which only learns of patches by attention."""
    return make_vit("vit", global_pool="avg", class_token=False)


def slope(model: nn.Module, x: Tensor, y: Tensor, cut: tuple[int, ...]) -> Tensor:
    """The gradient with the attention branches of some blocks cut off, written out."""
    z = x.clone().requires_grad_()
    handles = [model.blocks[k].attn.register_forward_hook(lambda _m, _a, out: out.detach()) for k in cut]
    (grad,) = torch.autograd.grad(nn.functional.cross_entropy(model(z), y, reduction="sum"), z)
    for handle in handles:
        handle.remove()
    return grad


@pytest.mark.parametrize("keep", [0, 0.5])
def test_gradients_pass_the_branches_that_were_drawn(keep):
    model = pooled_vit()
    x, y = batch()
    made = changed(keep, model, patches=False)
    aim = made.goal(model, x, y)
    plain = ATTACK.goal(model, x, y)
    cuts = set()
    for turn in range(ATTACK.steps):
        z = x.clone().requires_grad_()
        values, _ = aim.evaluate(z, turn / ATTACK.steps)
        assert torch.equal(values, plain.evaluate(x, 0.0)[0])  # what the model computes is the same
        (grad,) = torch.autograd.grad(values.sum(), z)
        matching = [
            cut
            for cut in ((), (0,), (1,), (0, 1))
            if torch.allclose(grad, slope(model, x, y, cut), rtol=1e-4, atol=1e-6)
        ]
        assert len(matching) == 1
        cuts.add(matching[0])
    assert cuts == {(0, 1)} if keep == 0 else len(cuts) > 1
    assert not model.blocks[0].attn._forward_hooks


def test_how_often_branches_and_patches_are_kept():
    dropping = _Dropping(SampleRNG.of_samples(0, [7]), 0.3, 10)
    kept = torch.tensor([dropping.kept_branches(turn, 500) for turn in range(10)]).double()
    assert float(kept.mean()) == pytest.approx(0.3, abs=0.03)  # four standard deviations
    out = torch.stack([dropping.reset_patches(turn, 100) for turn in range(200)]).double()
    assert out.sum(1).unique().tolist() == [70]
    assert float(out.mean(0).min()) > 0.7 - 5 * (0.21 / 200) ** 0.5


def test_without_any_attention_gradient_a_class_token_is_blind():
    """It learns of the patches by attention alone, so the search stays where it started."""
    model = make_vit("vit")
    x, y = batch()
    made = changed(0, model, patches=False)
    start = ATTACK.threat.random(x, DRAWS.stream("start"))
    assert torch.equal(made(model, x, y, DRAWS), start)
    assert not torch.equal(ATTACK(model, x, y, DRAWS), start)


def test_draws_belong_to_seed_and_step_and_not_to_the_batch():
    model = pooled_vit()
    x, y = batch()

    def crafted(run: FakeTraining, part: slice = slice(None)) -> Tensor:
        attack = RandomDropping(epochs=1000).change_attack(run, ATTACK)
        return attack(model, x[part], y[part], DRAWS[torch.arange(4)[part]])

    base = crafted(dropping_run(0.5, model))
    assert torch.equal(crafted(dropping_run(0.5, model)), base)
    assert not torch.equal(crafted(dropping_run(0.501, model)), base)
    assert not torch.equal(crafted(dropping_run(0.5, model, seed=1)), base)
    halves = torch.cat([crafted(dropping_run(0.5, model), part) for part in (slice(0, 2), slice(2, 4))])
    torch.testing.assert_close(halves, base, rtol=0, atol=1e-6)


def test_stays_inside_the_budget_and_takes_mixed_labels_and_another_eps():
    model = pooled_vit()
    x, y = batch()
    made = at_eps(changed(0.5, model), 3 / 255)
    mixed = nn.functional.one_hot(y, 5) * 0.6 + 0.08
    z = run_inner_attack(made, model, x, mixed, DRAWS)
    assert float((z - x).abs().max()) == pytest.approx(3 / 255, abs=1e-6)
    assert float(z.min()) >= 0
    assert float(z.max()) <= 1
    assert not torch.equal(z, run_inner_attack(made, model, x, y.flip(0), DRAWS))


@pytest.mark.parametrize("family", ["xcit", "cait", "swin", "levit", "siglip", "rvt", "fan"])
def test_gradients_always_find_a_way_where_there_is_no_class_token_among_the_patches(family):
    model = make_vit(family)
    x, y = batch(family)
    aim = _dropping_goal(ATTACK.goal, _Dropping(DRAWS[torch.tensor([0])], 0.0, 4))(model, x, y)
    z = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(aim.evaluate(z, 0.0)[0].sum(), z)
    assert bool((grad.flatten(1).abs().amax(1) > 0).all())


def test_what_it_cannot_change():
    with pytest.raises(UserError, match="training attack is Restarts"):
        RandomDropping().change_attack(dropping_run(0.5, make_vit("vit")), Restarts(ATTACK, 2))
    parallel = make_vit("vit", block_fn=timm.models.vision_transformer.ParallelScalingBlock)
    with pytest.raises(UserError, match="ParallelScalingBlock computes attention and MLP at once"):
        changed(0.5, parallel)(parallel, *batch())
    for epochs in (0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="epochs must be a finite number above 0"):
            RandomDropping(epochs=epochs)


def test_what_it_cannot_change_is_reported_before_training():
    with pytest.raises(UserError, match="training attack is Restarts"):
        RandomDropping().check_objective(Adversarial(Restarts(ATTACK, 2)), ATTACK.threat)
    RandomDropping().check_objective(Adversarial(ATTACK), ATTACK.threat)
    with pytest.raises(UserError, match="has no attack to weaken"):
        RandomDropping().check_objective(Standard(), ATTACK.threat)
    parallel = wrap(make_vit("vit", block_fn=timm.models.vision_transformer.ParallelScalingBlock))
    with pytest.raises(UserError, match="ParallelScalingBlock computes attention and MLP at once"):
        RandomDropping().check_model(parallel)
    RandomDropping(attention=False).check_model(parallel)
    RandomDropping().check_model(wrap(make_vit("vit")))
