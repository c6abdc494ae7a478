"""BPDA: the exact optimum behind a staircase, which modules are found, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks import make
from vitadel.attacks.bpda import BPDA, SearchedBPDA, bpda, find_masking_modules, named_modules
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Calibrated

EPS = 8 / 255


class Change(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


class Linear(nn.Module):
    """Two classes, a linear score of what `input_transform` returns."""

    def __init__(self, change) -> None:
        super().__init__()
        self.input_transform = Change(change)
        self.weight = SampleRNG.of_samples(3, range(1)).normal(3, 8, 8)[0]

    def forward(self, x: Tensor) -> Tensor:
        score = (self.input_transform(x) * self.weight).flatten(1).sum(1)
        return torch.stack([score, -score], 1)


def stairs(x: Tensor) -> Tensor:
    return (x * 255 / 4).round() * 4 / 255


def pixels(count: int = 12) -> Tensor:
    """Multiples of 8/255 away from black and white, so that every pixel can move by a whole step of the stairs."""
    return (images(count) * 20).round() * 8 / 255 + 40 / 255


def test_bpda_finds_the_optimum_behind_a_staircase():
    model, x = Linear(stairs), pixels()
    y = model(x).argmax(1)
    plain = make("fgsm", eps=EPS)(model, x, y)
    assert torch.equal(plain, x)  # no gradient, no move
    z = make("bpda(modules=input_transform)+fgsm", eps=EPS)(model, x, y)
    # A linear score is lowest where every pixel moves by eps against its weight; eps is two steps of the stairs.
    sign = torch.where(y == 0, -1.0, 1.0).view(-1, 1, 1, 1)
    assert torch.allclose(z, x + EPS * sign * model.weight.sign(), atol=1e-6)
    away = EPS * model.weight.abs().sum()
    before, after = (model(each)[torch.arange(len(x)), y] for each in (x, z))
    assert torch.allclose(before - after, away.expand(len(x)), rtol=1e-4)


def test_the_forward_pass_is_that_of_the_model():
    model, x = Linear(stairs), images(4)
    with BPDA(make("fgsm"), ("input_transform",))._change(model):
        z = x.clone().requires_grad_()
        logits = model(z)
        (grad,) = torch.autograd.grad(logits[:, 0].sum(), z)
    assert torch.equal(logits, model(x))
    assert torch.equal(grad, model.weight.expand_as(x))
    z = x.clone().requires_grad_()
    assert not torch.autograd.grad(model(z)[:, 0].sum(), z)[0].any()  # nothing is left behind


def test_a_given_backward_replaces_the_gradient():
    model, x = Linear(Tensor.detach), pixels()
    y = model(x).argmax(1)
    z = BPDA(make("fgsm", eps=EPS), ("input_transform",), lambda inner: -inner)(model, x, y)
    sign = torch.where(y == 0, 1.0, -1.0).view(-1, 1, 1, 1)  # the wrong way, as the stand-in says
    assert torch.allclose(z, (x + EPS * sign * model.weight.sign()).clamp(0, 1), atol=1e-6)
    named = make("bpda(modules=input_transform,backward=python:torch:Tensor.square)+fgsm".replace("Tensor.", ""))
    assert named.backward == "python:torch:square"
    assert (named(model, x, y) - x).abs().max() > 0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda x: x, []),
        (nn.functional.gelu, []),
        (Tensor.detach, ["input_transform"]),
        (stairs, ["input_transform"]),
        (lambda x: x + (2 * x).detach() - 2 * x, ["input_transform"]),  # forward 1, backward -1
    ],
    ids=["identity", "smooth", "missing", "zero", "reversed"],
)
def test_modules_that_do_not_match_are_found(change, found):
    model = nn.Sequential(Linear(change), TinyNetOn2())
    assert list(find_masking_modules(model, images(4))) == [f"0.{name}" for name in found]


class TinyNetOn2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        nn.init.eye_(self.layers[0].weight)
        nn.init.zeros_(self.layers[0].bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(0.01 * x)


def test_the_search_is_a_preparation():
    model, x = Linear(stairs), pixels()
    y = model(x).argmax(1)
    attack = make("bpda+fgsm", eps=EPS)
    assert isinstance(attack, SearchedBPDA)
    assert isinstance(attack, Calibrated)
    with pytest.raises(UserError, match="calibration images"):
        attack(model, x, y)
    ready = attack.prepared(model, [(images(4, seed=7), y[:4])])
    assert ready.modules == ("input_transform",)
    assert torch.equal(ready(model, x, y), make("bpda(modules=Input_Transform)+fgsm", eps=EPS)(model, x, y))
    with pytest.raises(UserError, match=r"wrong\. If the model"):
        attack.prepared(TinyNet().eval(), [(images(4), y[:4])])
    noisy = Linear(lambda x: x + 0.02 * torch.randn_like(x))
    with pytest.raises(UserError, match=r"found no module.*two answers to the same images.*eot:20\+pgd-20"):
        attack.prepared(noisy, [(images(4), y[:4])])


def test_a_name_that_modules_share_is_proposed_once():
    model = nn.ModuleDict({name: Linear(stairs) for name in "ab"})
    both = r"[ab]\.input_transform, [ab]\.input_transform"
    with pytest.raises(UserError, match=rf"did you mean input_transform, {both}\?"):
        named_modules(model, ("input_transfrom",))


def test_eot_and_bpda_together():
    torch.manual_seed(0)

    def noisy_stairs(x: Tensor) -> Tensor:
        return stairs(x + 0.02 * torch.randn_like(x))

    model, x = Linear(noisy_stairs), pixels()
    y = Linear(lambda x: x)(x).argmax(1)
    for name in ("eot:5+bpda(modules=input_transform)+fgsm", "bpda(modules=input_transform)+eot:5+fgsm"):
        z = make(name, eps=EPS)(model, x, y)
        sign = torch.where(y == 0, -1.0, 1.0).view(-1, 1, 1, 1)
        assert torch.allclose(z, x + EPS * sign * model.weight.sign(), atol=1e-6)
    with pytest.raises(UserError, match=r"two answers to the same images.*eot:20\+bpda"):
        make("bpda(modules=input_transform)+fgsm", eps=EPS)(model, x, y)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bpda(modules=input_transfrom)+fgsm", "no module 'input_transfrom'; did you mean input_transform"),
        ("bpda(modules=input_transform,backward=python:torch:sum)+fgsm", r"returns \(2, 3, 8, 8\).*\(\)"),
        ("bpda(modules=input_transform,backward=python:builtins:repr)+fgsm", r"returns \(2, 3, 8, 8\).*str"),
        ("bpda(modules=input_transform,backward=python:torch:t)+fgsm", r"RuntimeError: t\(\).*shape \(2, 3, 8, 8\)"),
        ("bpda(modules=input_transform,backward=smooth)+fgsm", "unknown backward 'smooth'"),
        ("bpda(modules=input_transform,backward=python:torch:summ)+fgsm", "has no 'summ'"),
        ("bpda(modules=;)+fgsm", "needs the names of modules"),
        ("eot:0+bpda+fgsm", "must be positive"),
    ],
)
def test_user_errors_are_one_message(name, message):
    model, x = Linear(stairs), images(2)
    with pytest.raises(UserError, match=message):
        make(name)(model, x, torch.zeros(2, dtype=torch.int64))


def test_a_module_that_changes_shapes_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    with pytest.raises(UserError, match="Name a module that keeps shapes"):
        make("bpda(modules=0)+fgsm")(model, images(2), torch.zeros(2, dtype=torch.int64))
    flat = bpda(make("fgsm"), "0", lambda x: x.flatten(1))
    assert flat(model, images(2), model(images(2)).argmax(1)).shape == (2, 3, 8, 8)
