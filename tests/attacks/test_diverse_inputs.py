"""Diverse inputs: the shrunken image is where it should be, and without diversity it is momentum ascent."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from toys import TinyNet, images
from vitadel.attacks.goals import OnLogits
from vitadel.attacks.losses import margin
from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Momentum
from vitadel.attacks.threats import Linf
from vitadel.attacks.transfer.diverse_inputs import Diverse, shrunk
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG
from vits import make_vit, pixels

EPS = 8 / 255


def test_full_size_is_the_image_itself():
    x = images(3)
    assert torch.allclose(shrunk(x, torch.ones(3), torch.rand(3, 2)), x, atol=1e-6)


@pytest.mark.parametrize(("corner", "place"), [((0, 0), (0, 0)), ((1, 0), (0, 8)), ((0, 1), (8, 0)), ((1, 1), (8, 8))])
def test_half_size_lies_in_the_named_corner_on_black(corner, place):
    x = images(2, side=16)
    small = shrunk(x, torch.full((2,), 0.5), torch.tensor([corner, corner], dtype=torch.float32))
    top, left = place
    inner = small[:, :, top : top + 8, left : left + 8]
    # Each small pixel is the mean of the two by two that it stands for.
    assert torch.allclose(inner, F.avg_pool2d(x, 2), atol=1e-5)
    outside = small.clone()
    outside[:, :, top : top + 8, left : left + 8] = 0
    assert outside.abs().max() < 1e-6


def test_without_diversity_it_is_momentum_ascent_on_the_margin():
    model, x = TinyNet(3).eval(), images(4)
    y = model(x).argmax(1)
    ours = Diverse(Linf(EPS), steps=5, probability=0.0)(model, x, y)
    plain = PGD(Linf(EPS), OnLogits(margin), Momentum(1.0), 5, random_start=False, stop_when_fooled=False)(model, x, y)
    assert torch.equal(ours, plain)


def test_every_step_sees_another_image():
    seen = []

    class Watching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = TinyNet(3).eval()

        def forward(self, z):
            seen.append(z.detach().clone())
            return self.inner(z)

    x = images(2)
    Diverse(Linf(EPS), steps=4, probability=1.0, smallest=0.3)(Watching(), x, torch.zeros(2, dtype=torch.int64))
    black = [(each == 0).all(1).flatten(1).sum(1) for each in seen]
    assert len(seen) == 4
    assert len({tuple(each.tolist()) for each in black}) >= 3  # the frames that are left around both images


def test_strange_tokens_are_beside_the_image_and_change_from_step_to_step():
    model, x = make_vit("vit"), pixels("vit")
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(0, range(len(x)))
    plain, beside = (Diverse(Linf(EPS), 4, probability=0.0, tokens=r)(model, x, y, rng) for r in (0, 4))
    assert not torch.equal(plain, beside)
    tokens = model.blocks[0].register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[1]))
    counts: list[int] = []
    Diverse(Linf(EPS), 4, probability=0.0, tokens=4)(model, x, y, rng)
    tokens.remove()
    assert counts == [1 + 16 + 4] * 4


def test_tokens_need_a_transformer():
    model, x = TinyNet(3).eval(), images(2)
    with pytest.raises(UserError):
        Diverse(Linf(EPS), 2, tokens=2)(model, x, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    "wrong", [{"loss": "mse"}, {"probability": 1.5}, {"smallest": 0.0}, {"tokens": -1}], ids=lambda each: str(each)
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Diverse(Linf(EPS), **wrong)
