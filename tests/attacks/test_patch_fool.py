"""Patch-Fool against computations that use none of its code."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toys import TinyNet, images
from vitadel.attacks.goals import Changed, Surrogate
from vitadel.attacks.patches import patch_fool as module
from vitadel.attacks.patches.patch_fool import PatchFool, attention_drawn, patch_fool, without_conflict
from vitadel.attacks.patches.patch_threat import Patches, changed_patches, patch_grid_of
from vitadel.attacks.patches.random_patches import RandomPatches
from vitadel.attacks.threats import L1, L2, Linf
from vitadel.attacks.wrappers import Averaged
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.instrument import attention_maps, scaled_attention
from vitadel.runtime.rng import SampleRNG
from vits import make_vit, pixels

BALL = Linf(8 / 255)


def deep(layers: int = 6, seed: int = 0) -> nn.Module:
    return make_vit("vit", seed=seed, depth=layers).double()


def sample(model: nn.Module, count: int = 6, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = pixels("vit", count, seed, dtype=torch.float64)
    with torch.no_grad():
        return x, model(x).argmax(1)


def stubborn(model: nn.Module) -> nn.Module:
    """The same model, but nothing that happens to its features changes the answer 0."""
    with torch.no_grad():
        model.head.bias[0] += 1e4
    return model


def random_gradients() -> tuple[Tensor, Tensor]:
    rng = SampleRNG.of_samples(0, range(40))
    return rng.stream("a").normal(3, 8, 8).double(), rng.stream("b").normal(3, 8, 8).double()


def dots(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def test_after_projection_nothing_works_against_the_main_gradient():
    side, main = random_gradients()
    before, after = dots(side, main), dots(without_conflict(side, main), main)
    conflict = before < 0
    assert conflict.any()
    assert not conflict.all()
    assert after[conflict].abs().max() < 1e-12 * before.abs().max()
    assert torch.equal(without_conflict(side, main)[~conflict], side[~conflict])


def test_division_by_the_norm_alone_leaves_the_conflict_or_turns_it():
    side, main = random_gradients()
    main = main * 0.01
    before = dots(side, main)
    after = dots(without_conflict(side, main, squared=False), main)
    conflict = before < 0
    length = main.flatten(1).norm(dim=1)
    assert torch.allclose(after[conflict], (before * (1 - length))[conflict])


def test_no_main_gradient_gives_no_nan():
    side, main = random_gradients()
    assert torch.equal(without_conflict(side, main * 0), side)


def test_uniform_attention_draws_the_log_of_its_share():
    attention = torch.full((2, 3, 5, 5), 0.2)
    drawn = attention_drawn(attention, torch.tensor([[1, 3], [0, 4]]))
    assert torch.allclose(drawn, torch.full((2,), math.log(0.2)))


def test_attention_is_averaged_over_heads_before_the_log_and_over_queries_after_it():
    attention = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    attention[0, :, 0, 2] = torch.tensor([0.1, 0.3])
    attention[0, :, 1, 2] = torch.tensor([0.8, 0.2])
    expected = (math.log(0.2) + math.log(0.5)) / 2
    assert attention_drawn(attention, torch.tensor([[2]])).item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vanished_attention_has_a_finite_log_and_slope(dtype):
    scores = torch.tensor([[[[0.0, -60.0, -100.0, -300.0]]]], dtype=dtype, requires_grad=True)
    drawn = attention_drawn(scores.softmax(-1), torch.tensor([[1, 2, 3]]))
    (slope,) = torch.autograd.grad(drawn.sum(), scores)
    assert drawn.isfinite().all()
    assert slope.isfinite().all()


def test_adam_is_torchs_adam():
    start = torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 3, 2, 2)
    ours = module._Adam(0.2, 0.95, 10, torch.zeros_like(start), torch.zeros_like(start))
    z, theirs = start.clone(), start.clone().requires_grad_()
    optimizer = torch.optim.Adam([theirs], lr=0.2, maximize=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.95)
    for turn in range(35):
        grad = torch.sin(3 * z + turn)
        theirs.grad = grad.clone()
        optimizer.step()
        schedule.step()
        z = ours.move(z, grad, turn)
        assert torch.allclose(z, theirs.detach(), atol=1e-9)


def columns(model: nn.Module, x: Tensor, layer: int) -> Tensor:
    """How much each patch is attended to, by all queries and heads."""
    with torch.no_grad(), attention_maps(model) as maps:
        model(x)
    return maps[layer].mean((1, 2))[:, 1:]


@pytest.mark.parametrize("count", [1, 3])
def test_the_patches_attended_to_most_are_repainted(count):
    model = deep()
    x, y = sample(model)
    z = patch_fool(BALL, patches=count, steps=2)(model, x, y)
    wanted = columns(model, x, 4).topk(count, dim=1).indices.sort(dim=1).values
    assert torch.equal(changed_patches(z, x, 8).nonzero()[:, 1].view(-1, count), wanted)


def test_the_patches_with_the_largest_gradient_are_repainted():
    model = deep()
    x, y = sample(model)
    z = patch_fool(BALL, patches=2, steps=2, select="saliency")(model, x, y)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.cross_entropy(model(leaf), y), leaf)
    salient = F.avg_pool2d(grad.abs().sum(1, keepdim=True), 8).flatten(1)
    wanted = salient.topk(2, dim=1).indices.sort(dim=1).values
    assert torch.equal(changed_patches(z, x, 8).nonzero()[:, 1].view(-1, 2), wanted)


def test_random_patches_are_distinct_and_the_papers_are_not():
    model = deep(2)
    x, y = sample(model, 30)
    rng = SampleRNG.of_samples(0, range(30))
    counts = [
        Patches(6, 8).size(patch_fool(BALL, patches=6, steps=1, select="random", paper=paper)(model, x, y, rng), x)
        for paper in (False, True)
    ]
    assert (counts[0] == 6).all()
    assert counts[1].max() == 6
    assert counts[1].min() < 6


@pytest.mark.parametrize("paper", [False, True])
def test_the_direction_is_what_the_paper_says(paper):
    """Cross-entropy plus alpha times the attention of layers 1 and 2 (of 6), each without its conflict."""
    model = deep().requires_grad_(False)
    x, y = sample(model)
    picked = torch.tensor([[3, 7]]).expand(len(x), -1)
    attack = patch_fool(BALL, patches=2, alpha=0.7, paper=paper)
    area = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    area[..., :8, 24:] = area[..., 8:16, 24:] = True
    _, direction = attack._step_direction(model, module._PatchBatch(x, y, picked, patch_grid_of(model, x)), x)

    leaf = x.clone().requires_grad_()
    with attention_maps(model) as maps:
        logits = model(leaf)
    (main,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), leaf, retain_graph=True)
    main = main * area
    expected, conflicts = main.clone(), 0
    for layer in (1, 2):
        seen = maps[layer].mean(1)[:, :, [4] if paper else [4, 8]].log().mean((1, 2))
        (grad,) = torch.autograd.grad(seen.sum(), leaf, retain_graph=True)
        for i, (ours, theirs) in enumerate(zip(grad * area, main, strict=True)):
            dot, length = (ours * theirs).sum(), theirs.norm()
            conflicts += int(dot < 0)
            share = 0 if dot >= 0 else dot / (length if paper else length**2)
            expected[i] += 0.7 * (ours - share * theirs)
    assert 0 < conflicts < 2 * len(x)
    assert torch.allclose(direction, expected, atol=1e-10)


def test_who_is_fooled_leaves_at_once_with_the_iterate_that_fooled():
    model = deep()
    x, y = sample(model, 12)
    wrong = (y + 1) % 5
    short, long = (patch_fool(BALL, patches=1, steps=steps)(model, x, wrong) for steps in (1, 40))
    at_start = model(short).argmax(1) != wrong
    assert at_start.any()
    assert torch.equal(short[at_start], long[at_start])
    with count_passes(model) as cost:
        patch_fool(BALL, steps=40)(model, x[at_start], wrong[at_start])
    assert cost.forwards == 2 * at_start.sum()  # selection and one look
    assert cost.gradients == 0


def test_the_papers_variant_goes_on_to_its_last_iterate():
    model = deep()
    x, y = sample(model, 6)
    wrong = (y + 1) % 5
    with count_passes(model) as cost:
        patch_fool(BALL, steps=4, paper=True)(model, x, wrong)
    assert (cost.gradients, cost.forwards) == (24, 6)
    assert patch_fool(BALL, paper=True).rate == 0.22
    assert patch_fool(BALL).rate == 0.2


@pytest.mark.parametrize("select", ["attention", "saliency", "random"])
def test_costs_what_it_says(select):
    model = stubborn(deep(2))
    x = pixels("vit", 5, dtype=torch.float64)
    attack = patch_fool(BALL, steps=4, select=select)
    with count_passes(model) as cost:
        attack(model, x, torch.zeros(5, dtype=torch.long))
    gradients, forwards = attack.passes()
    assert (cost.gradients, cost.forwards) == (5 * gradients, 5 * forwards)


@pytest.mark.parametrize(("mild", "ball"), [("linf", Linf(8 / 255)), ("l2", L2(0.5))])
def test_the_mild_variants_stay_in_their_ball(mild, ball):
    model = stubborn(deep(2))
    x = pixels("vit", 5, dtype=torch.float64)
    attack = patch_fool(ball, patches=3, steps=6, mild=mild)
    z = attack(model, x, torch.zeros(5, dtype=torch.long))
    rules = attack.rules(model, x)
    assert rules == Patches(3, 8, ball)
    assert (rules.size(z, x) == 3).all()
    assert torch.allclose(ball.size(z, x), torch.full((5,), ball.eps, dtype=torch.float64), rtol=0.02)


def test_the_mild_radius_must_be_of_its_norm():
    for ball in (L1(3.0), Linf(0.1)):
        with pytest.raises(UserError, match=r"mild=l2 takes its radius from eps.*--norm l2"):
            patch_fool(ball, mild="l2")


def test_it_fools_where_noise_in_as_many_patches_does_not():
    model = make_vit("vit", depth=4)
    x = pixels("vit", 24)
    y = model(x).argmax(1)
    attack = patch_fool(BALL, patches=1, steps=30)
    verdict = judge(model, attack.rules(model, x), x, attack(model, x, y), y)
    noise = RandomPatches(BALL, share=1 / 16, masks=1)
    by_chance = judge(model, noise.rules(model, x), x, noise(model, x, y), y)
    assert not verdict.void.any()
    assert verdict.held.float().mean() < by_chance.held.float().mean() - 0.2


def test_the_attention_term_draws_attention():
    model = stubborn(deep())
    x = pixels("vit", 6, dtype=torch.float64)
    y, rng = torch.zeros(6, dtype=torch.long), SampleRNG.of_samples(0, range(6))
    drawn = []
    for alpha in (1e-9, 1e3):
        z = PatchFool(BALL, steps=15, alpha=alpha)(model, x, y, rng)
        chosen = changed_patches(z, x, 8)
        drawn.append((columns(model, z, 1) + columns(model, z, 2))[chosen].mean())
    assert drawn[1] > 1.2 * drawn[0]


@pytest.mark.parametrize(
    "name",
    [
        "deit_distilled",
        "deit3",
        "dinov2_registers",
        "siglip",
        "parallel",
        "eva02",
        "dinov3",
        "beit",
        "cait",
        "levit",
        "rvt",
    ],
)
def test_works_on_every_family_that_attends_between_patches(name):
    model, x = make_vit(name), pixels(name, 4)
    y = model(x).argmax(1)
    attack = patch_fool(BALL, patches=2, steps=5)
    rules = attack.rules(model, x)
    assert (rules.size(attack(model, x, y), x) == 2).all()


@pytest.mark.parametrize("name", ["xcit", "swin", "swinv2"])
def test_other_attention_is_refused(name):
    model, x = make_vit(name), pixels(name)
    with pytest.raises(UserError, match="follows the attention between patches, and this model has none"):
        patch_fool(BALL, steps=2)(model, x, model(x).argmax(1))


@pytest.mark.parametrize("name", ["xcit", "swin", "swinv2", "vit"])
def test_without_the_attention_term_no_attention_is_needed(name, monkeypatch):
    model, x = make_vit(name), pixels(name, 4)
    y = model(x).argmax(1)
    attack = patch_fool(BALL, patches=2, steps=3, select="saliency", alpha=0.0)
    monkeypatch.setattr(module, "attention_maps", None)  # reading maps fails
    assert (attack.rules(model, x).size(attack(model, x, y), x) == 2).all()


def test_without_the_attention_term_only_the_cross_entropy_is_climbed():
    model = deep().requires_grad_(False)
    x, y = sample(model)
    scene = module._PatchBatch(x, y, torch.tensor([[3, 7]]).expand(len(x), -1), patch_grid_of(model, x))
    _, direction = patch_fool(BALL, patches=2, alpha=0.0)._step_direction(model, scene, x)
    leaf = x.clone().requires_grad_()
    (main,) = torch.autograd.grad(F.cross_entropy(model(leaf), y, reduction="sum"), leaf)
    assert torch.allclose(direction, main * scene.area, atol=1e-12)


def test_the_layer_that_chooses_patches_is_number_four_or_the_last_or_the_one_given():
    model = deep()
    x, y = sample(model)
    shallow = deep(3)

    def chosen(net: nn.Module, **settings: int) -> Tensor:
        return changed_patches(patch_fool(BALL, patches=3, steps=1, **settings)(net, x, y), x, 8)

    assert torch.equal(chosen(model), chosen(model, layer=4))
    assert torch.equal(chosen(shallow), chosen(shallow, layer=2))
    assert not torch.equal(chosen(model, layer=0), chosen(model))
    with pytest.raises(UserError, match=r"layer 6, but 6 attention maps .* from 0 to 5"):
        chosen(model, layer=6)


def test_restarts_try_other_content():
    model = make_vit("vit", depth=4)
    x = pixels("vit", 24)
    y = model(x).argmax(1)

    def held(restarts: int) -> int:
        attack = patch_fool(BALL, steps=1, rate=1e-6, restarts=restarts)
        return int((model(attack(model, x, y)).argmax(1) == y).sum())

    assert held(4) < held(1)


def test_models_without_patches_are_refused():
    with pytest.raises(UserError, match="not known here"):
        patch_fool(BALL, steps=2)(TinyNet().eval(), images(2), torch.zeros(2, dtype=torch.long))


def test_more_patches_than_there_are_is_refused():
    with pytest.raises(UserError, match="17 patches, but an image has 16"):
        patch_fool(BALL, patches=17).rules(make_vit("vit"), pixels("vit"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "atention"}, "did you mean attention"),
        ({"mild": "linff"}, "did you mean linf"),
        ({"patches": 0}, "at least 1 patch"),
        ({"steps": 0}, "1 step"),
        ({"layer": 2, "select": "random"}, "needs select=attention; got 2 and select=random"),
        ({"layer": 2.5}, "got 2.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        patch_fool(BALL, **settings)


def test_behind_a_surrogate_the_deployed_model_decides():
    model = deep(4)
    x, y = sample(model, 8)
    changed = Surrogate(Changed(model, lambda inner: scaled_attention(inner, 0.3)), model)
    z, longer = (patch_fool(BALL, steps=steps)(changed, x, y) for steps in (20, 21))
    fooled = model(z).argmax(1) != y
    left = (z == longer).flatten(1).all(1)
    assert left.any()
    assert fooled[left].all()  # no sample stops because it fools the changed model only


def test_a_model_that_recomputes_its_forward_pass_gives_the_same():
    model = deep(4)
    x, y = sample(model, 3)
    plain = patch_fool(BALL, steps=3)
    assert torch.allclose(Averaged(plain, 2)(model, x, y), plain(model, x, y), atol=1e-8)
