"""Adversarial weight perturbation: direction and length in closed form, and what must stay as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from training_toys import FakeTraining

from toys import TinyNet, images
from vitadel.errors import UserError
from vitadel.training.interfaces import AroundStep
from vitadel.training.plugins.awp import AWP
from vits import make_vit, pixels


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


class Halves:
    """The loss of each part of a batch, on the model as it is when asked."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, parts: int = 2) -> None:
        self.model, self.parts = model, list(zip(x.chunk(parts), y.chunk(parts), strict=True))

    def __call__(self) -> Iterator[Tensor]:
        for x, y in self.parts:
            yield nn.functional.cross_entropy(self.model(x), y)


@pytest.mark.parametrize("times", [1, 2**16])
def test_a_linear_loss_in_closed_form(times):
    """loss = sum(c * W) has the gradient c everywhere: W moves by gamma * |W| * c / |c|, however the loss is scaled."""
    model = nn.Linear(3, 2)
    slope = torch.tensor([[3.0, 0.0, -4.0], [0.0, 12.0, 0.0]])  # of length 13
    before = weights_of(model)
    run = FakeTraining(model)
    losses = lambda: [times * ((slope * model.weight).sum() + model.bias.sum())]  # noqa: E731
    with AWP(gamma=0.1).around_step(run, losses):
        expected = before["weight"] + 0.1 * before["weight"].norm() * slope / 13
        torch.testing.assert_close(model.weight.detach(), expected)
        assert torch.equal(model.bias.detach(), before["bias"])
    torch.testing.assert_close(model.weight.detach(), before["weight"])


def test_each_matrix_moves_by_gamma_of_its_length_and_nothing_else_moves():
    model = make_vit("xcit").train()
    x, y = pixels("xcit", 4), torch.arange(4)
    before = weights_of(model)
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    run = FakeTraining(model)
    with AWP(gamma=0.02).around_step(run, Halves(model, x, y)):
        moved = weights_of(model)
        for name, old in before.items():
            size = float((moved[name] - old).norm() / old.norm())
            assert size == pytest.approx(0.02 if old.dim() >= 2 and "weight" in name else 0, rel=1e-3), name
        assert {name for name in moved if not torch.equal(moved[name], before[name])} >= {
            "blocks.0.attn.qkv.weight", "patch_embed.proj.0.0.weight", "head.weight"
        }  # fmt: skip
    for name, old in before.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), old, rtol=1e-5, atol=1e-6)
    assert any("running_mean" in name for name in buffers)
    assert all(torch.equal(model.get_buffer(name), old) for name, old in buffers.items())
    assert all(weight.grad is None for weight in model.parameters())
    assert all(module.track_running_stats for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_it_goes_uphill_and_the_parts_make_the_whole():
    model = make_vit("vit").eval()
    x, y = pixels("vit", 4), torch.arange(4)
    moved = []
    for parts in (1, 2, 4):
        losses = Halves(model, x, y, parts)
        before = float(sum(losses()).detach()) / parts
        with AWP(gamma=1e-3).around_step(FakeTraining(model), losses):
            assert float(sum(losses()).detach()) / parts > before
            moved.append(model.get_parameter("blocks.1.attn.qkv.weight").detach().clone())
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved[2], moved[0], rtol=1e-4, atol=1e-5)


def test_the_optimizers_step_stays_when_the_move_is_taken_back():
    model = nn.Linear(2, 2, bias=False)
    before = model.weight.detach().clone()
    run, losses = FakeTraining(model), lambda: [model.weight.square().sum()]
    with AWP(gamma=0.5).around_step(run, losses):
        at = model.weight.detach().clone()
        torch.testing.assert_close(at, 1.5 * before)  # the gradient is along the weights themselves
        with torch.no_grad():
            model.weight -= 0.1 * 2 * at  # one step of gradient descent at the moved weights
    torch.testing.assert_close(model.weight.detach(), before - 0.3 * before)


def test_weights_come_back_after_an_error():
    model = TinyNet()
    before = weights_of(model)
    losses = Halves(model, images(4), torch.arange(4) % 3)
    with pytest.raises(KeyError), AWP(0.1).around_step(FakeTraining(model), losses):
        raise KeyError
    for name, old in before.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), old)


def test_unused_and_frozen_weights_stay_and_gradients_under_way_are_kept():
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2), "frozen": nn.Linear(3, 2)})
    model["frozen"].requires_grad_(False)
    gradient = torch.full((2, 3), 7.0)
    model["used"].weight.grad = gradient.clone()
    before = weights_of(model)
    x = torch.ones(1, 3)
    losses = lambda: [(model["used"](x) * model["frozen"](x)).sum()]  # noqa: E731
    with AWP(0.1).around_step(FakeTraining(model), losses):
        changed = [name for name, old in before.items() if not torch.equal(model.get_parameter(name), old)]
    assert changed == ["used.weight"]
    assert torch.equal(model["used"].weight.grad, gradient)


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_an_overflow_does_not_cost_the_weights(factor):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with AWP(0.1).around_step(FakeTraining(model), lambda: [factor * model.weight.square().sum()]):
        assert torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def test_it_waits_for_its_epoch():
    model = TinyNet()
    before = weights_of(model)

    def unasked() -> Iterator[Tensor]:
        raise AssertionError

    plugin = AWP(from_epoch=2)
    assert isinstance(plugin, AroundStep)
    with plugin.around_step(FakeTraining(model, epoch=1), unasked):
        assert all(torch.equal(model.get_parameter(name), old) for name, old in before.items())
    with plugin.around_step(FakeTraining(model, epoch=2), Halves(model, images(4), torch.arange(4) % 3)):
        assert not torch.equal(model.get_parameter("features.0.weight"), before["features.0.weight"])


def test_gamma_must_be_positive():
    for gamma in (0, -0.01, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"gamma must be a finite number above 0, got {gamma}"):
            AWP(gamma=gamma)
    with pytest.raises(UserError, match="at least 0, got -1"):
        AWP(from_epoch=-1)
