"""One contract over everything that claims to be an attack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toys import Constant, TinyNet, images
from vitadel.attacks import make
from vitadel.attacks.presets import CATALOGUE
from vitadel.attacks.threats import NORMS, threat
from vitadel.errors import Mistake
from vitadel.evaluation.metering import metered
from vitadel.runtime.draws import Draws

BUDGETS = {"linf": 8 / 255, "l2": 0.5, "l1": 3.0}
SHORT = {"square": "square(queries=300)", "fgsm": "fgsm", "fgsm-rs": "fgsm-rs"}
NAMES = [SHORT.get(name, f"{name}-6") for name in CATALOGUE]
NAMES += ["pgd-6(restarts=3)", "eot:2+pgd-6", "targeted:next+pgd-6"]
EVERYTHING = [pytest.param(name, norm, id=f"{name} {norm}") for name in NAMES for norm in NORMS]
CLASSES = 3


@pytest.fixture
def model() -> nn.Module:
    return TinyNet(CLASSES).eval()


@pytest.fixture
def precise(model: nn.Module, batch) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """In float64, where rounding does not decide between two nearly equal gradients: what must agree, agrees."""
    x, y = batch
    return model.double(), x.double(), y


@pytest.fixture
def batch(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x = images(7)
    with torch.no_grad():
        y = model(x).argmax(1)
    y[0] = (y[0] + 1) % CLASSES  # one label is wrong from the start
    return x, y


def run(name, norm, model, x, y, eps=None, draws=None):
    return make(name, eps=BUDGETS[norm] if eps is None else eps, norm=norm)(model, x, y, draws)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_stays_in_shape_box_and_budget(name, norm, model, batch):
    x, y = batch
    for dtype in (torch.float32, torch.float64):
        z = run(name, norm, model.to(dtype), x.to(dtype), y)
        assert z.shape == x.shape
        assert z.dtype == dtype
        assert not z.requires_grad
        assert z.min() >= -1e-6
        assert z.max() <= 1 + 1e-6
        assert threat(norm, BUDGETS[norm]).size(z, x.to(dtype)).max() <= BUDGETS[norm] + 1e-6


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_fools_more_than_noise_of_the_same_size(name, norm, model):
    x = images(40, seed=5)
    y = model(x).argmax(1)
    ball = threat(norm, BUDGETS[norm])
    noise = ball.random(x, Draws.of_samples(1, range(40)))
    held = (model(run(name, norm, model, x, y)).argmax(1) == y).float().mean()
    assert held < (model(noise).argmax(1) == y).float().mean()


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_leaves_no_trace(name, norm, batch):
    x, y = batch
    model = TinyNet(CLASSES)
    model.features[1].eval()  # mixed modes must survive
    parameters = [p.clone() for p in model.parameters()]
    next(model.parameters()).requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    x_before, rng = x.clone(), torch.get_rng_state()
    run(name, norm, model, x, y)
    assert torch.equal(x, x_before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_depends_on_seed_and_sample_only(name, norm, precise):
    model, x, y = precise
    draws = Draws.of_samples(3, range(len(x)))
    whole = run(name, norm, model, x, y, draws=draws)
    assert torch.equal(whole, run(name, norm, model, x, y, draws=draws))
    alone = torch.cat(
        [run(name, norm, model, x[i : i + 1], y[i : i + 1], draws=draws[torch.tensor([i])]) for i in range(len(x))]
    )
    assert torch.allclose(whole, alone, atol=1e-5)
    backwards = torch.arange(len(x)).flip(0)
    turned = run(name, norm, model, x[backwards], y[backwards], draws=draws[backwards])
    assert torch.allclose(whole, turned[backwards], atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_without_indices_draws_follow_the_pixels(name, norm, precise):
    model, x, y = precise
    whole = run(name, norm, model, x, y)
    parts = torch.cat([run(name, norm, model, x[:3], y[:3]), run(name, norm, model, x[3:], y[3:])])
    assert torch.allclose(whole, parts, atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_no_budget_means_no_change(name, norm, model, batch):
    x, y = batch
    assert torch.equal(run(name, norm, model, x, y, eps=0.0), x)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_constant_logits_give_no_nan(name, norm, batch):
    x, y = batch
    z = run(name, norm, Constant(), x, y)
    assert z.isfinite().all()


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_memory_layout_does_not_matter(name, norm, precise):
    model, x, y = precise
    plain = run(name, norm, model, x, y)
    for odd in (x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.allclose(run(name, norm, model, odd, y), plain, atol=1e-5)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_works_under_autocast(name, norm, model, batch):
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = run(name, norm, model, x, y)
    assert z.dtype == x.dtype
    assert threat(norm, BUDGETS[norm]).size(z, x).max() <= BUDGETS[norm] + 1e-6


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_few_classes_work(name, norm, classes):
    model, x = TinyNet(classes).eval(), images(5)
    y = model(x).argmax(1)
    assert run(name, norm, model, x, y).isfinite().all()


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_pixels_outside_the_box_are_refused(name, norm, model, batch):
    x, y = batch
    with pytest.raises(Mistake, match=r"pixels in \[0, 1\]"):
        run(name, norm, model, x * 255, y)


@pytest.mark.parametrize(("name", "norm"), EVERYTHING)
def test_costs_no_more_than_it_says(name, norm):
    model, x = TinyNet(10).eval(), images(6)
    y = model(x).argmax(1)
    attack = make(name, eps=1e-4, norm=norm)  # too small to fool anything: every sample goes all the way
    gradients, forwards = attack.passes()
    with metered(model) as cost:
        attack(model, x, y)
    assert (cost.gradients, cost.forwards) == (6 * gradients, 6 * forwards)
