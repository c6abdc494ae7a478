"""Wrappers that show an attack another model: towards a class, and averaged over randomness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks import PGD, Linf, make
from vitadel.attacks.goals import Surrogate, deployed, fooled, seen_through
from vitadel.attacks.square import Square
from vitadel.attacks.wrappers import Averaged, Targeted, mean_logits
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes
from vitadel.runtime.rng import SampleRNG


class Linear(nn.Module):
    """Four classes whose logits are four pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :4] * 10


def test_a_number_is_reached_by_every_sample():
    x = torch.full((3, 3, 4, 4), 0.5)
    x[:, 0, 0, 0] = 0.55
    y = torch.zeros(3, dtype=torch.int64)
    for attack in (PGD(Linf(0.1), steps=5), Square(Linf(0.1), queries=300)):
        z = Targeted(attack, 2)(Linear(), x, y)
        assert Linear()(z).argmax(1).tolist() == [2, 2, 2]


def test_rules_choose_by_the_clean_logits():
    x = torch.full((2, 3, 4, 4), 0.5)
    x[0, 0, 0] = torch.tensor([0.60, 0.50, 0.58, 0.55])
    x[1, 0, 0] = torch.tensor([0.50, 0.60, 0.52, 0.51])
    y = torch.tensor([0, 1])
    model = Linear()
    for rule, expected in (("next", [2, 2]), ("least", [1, 0])):
        assert Targeted(PGD(Linf(0.2), steps=10), rule)(model, x, y).flatten(1)[:, :4].argmax(1).tolist() == expected
    chosen = Targeted(PGD(Linf(0.2)), "random")._targets(
        model, x.repeat(50, 1, 1, 1), y.repeat(50), SampleRNG.of_samples(0, range(100))
    )
    assert not (chosen == y.repeat(50)).any()
    assert set(chosen[::2].tolist()) == {1, 2, 3}
    assert set(chosen[1::2].tolist()) == {0, 2, 3}


def test_landing_in_a_third_class_is_not_the_target():
    """From class 0, class 1 is within reach and class 2 is not: a targeted search must not stop at class 1."""
    x = torch.full((1, 3, 4, 4), 0.5)
    x[0, 0, 0] = torch.tensor([0.55, 0.54, 0.2, 0.5])
    y = torch.tensor([0])
    z = Targeted(PGD(Linf(0.05), steps=20, random_start=False), 2)(Linear(), x, y)
    logits = Linear()(z)[0]
    assert float(logits[2] - logits[[0, 1, 3]].max()) == pytest.approx((0.25 - 0.5) * 10, abs=0.3)


def test_impossible_targets_are_refused():
    x, y = torch.full((2, 3, 4, 4), 0.5), torch.tensor([1, 0])
    with pytest.raises(UserError, match="label of 1 of the samples"):
        Targeted(PGD(Linf(0.1)), 1)(Linear(), x, y)
    with pytest.raises(UserError, match="has 4, numbered from 0"):
        Targeted(PGD(Linf(0.1)), 4)(Linear(), x, y)
    with pytest.raises(UserError, match="next, least, random"):
        make("targeted:nearest+pgd-5")


class Shaky(nn.Module):
    """Adds noise from torch's own generator to its logits; the mean of many passes is the linear model."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :2] * 10 + torch.randn(len(x), 2)


def test_averaging_finds_the_mean_model():
    torch.manual_seed(0)
    x = torch.full((4, 3, 4, 4), 0.5)
    x[:, 0, 0, 0] = 0.53  # 0.3 ahead in logits, a third of the noise's size
    y = torch.zeros(4, dtype=torch.int64)
    z = Averaged(PGD(Linf(0.1), steps=10, random_start=False), 400)(Shaky(), x, y)
    clean = z.flatten(1)[:, :2]
    assert (clean[:, 1] - clean[:, 0] > -0.02).all()  # stops when the mean, not a single pass, is fooled
    held = Averaged(PGD(Linf(0.001), steps=3, random_start=False), 400)(Shaky(), x, y)
    assert (held.flatten(1)[:, 0] > held.flatten(1)[:, 1]).all()


def test_averaging_an_exact_model_changes_nothing():
    model, x = TinyNet().eval().double(), images(5).double()
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(5))
    plain, mean = (attack(model, x, y, rng) for attack in (PGD(Linf(0.03)), Averaged(PGD(Linf(0.03)), 3)))
    assert torch.allclose(plain, mean, atol=1e-9)


def test_averaging_holds_one_pass_in_memory():
    """What is saved for the backward pass does not grow with the number of passes."""

    def saved(times: int) -> int:
        model, x = TinyNet().eval().requires_grad_(False), images(4).requires_grad_()
        kept: dict[int, Tensor] = {}  # the tensors themselves, so that no address is used twice
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
            mean_logits(model, x, times) if times else model(x)
        return sum(t.numel() for t in kept.values())

    assert saved(20) == saved(1) < saved(0)


def test_passes_are_counted_with_the_second_run():
    model, x = TinyNet().eval(), images(4)
    y = model(x).argmax(1)
    attack = Averaged(PGD(Linf(1e-5), steps=3), 5)
    with count_passes(model) as cost:
        attack(model, x, y)
    gradients, forwards = attack.passes()
    assert (cost.gradients, cost.forwards) == (4 * gradients, 4 * forwards)


class Shifted(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :2] * 10 + torch.tensor([0.0, self.by])


def test_a_surrogate_is_climbed_and_the_deployed_model_judges():
    x = torch.full((1, 3, 4, 4), 0.5)
    x[:, 0, 0, 0] = 0.6
    y = torch.tensor([0])
    easy, hard = Shifted(5.0), Shifted(0.0)
    model = Surrogate(easy, hard)
    assert fooled(easy, x, easy(x), y).item()
    assert not fooled(model, x, model(x), y).item()
    assert deployed(model) is hard
    z = PGD(Linf(0.1), steps=10, random_start=False)(model, x, y)
    assert hard(z).argmax(1).item() == 1  # went on although the surrogate was fooled from the start
    view = seen_through(model, lambda inner: nn.Sequential(inner, nn.Identity()))
    assert isinstance(view, Surrogate)
    assert torch.equal(view(x), easy(x))
    assert torch.equal(deployed(view)(x), hard(x))
