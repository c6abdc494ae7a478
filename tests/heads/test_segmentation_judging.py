"""Bootstrap intervals of both mIoU against closed forms, and the goal of attacks on masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitadel.attacks.pgd import PGD
from vitadel.attacks.steppers import Steepest
from vitadel.attacks.threats import Linf
from vitadel.heads.segmentation import IGNORED, Confusion, OnPixels
from vitadel.runtime.rng import SampleRNG


def images(*hits: int) -> Confusion:
    """Images of ten pixels of class 0, `hits` of which are called so, the others class 1."""
    confusion = Confusion(2)
    for count in hits:
        confusion.add(torch.tensor([0] * count + [1] * (10 - count)).view(1, 1, 10), torch.zeros(1, 1, 10).long())
    return confusion


def test_images_that_are_all_alike_leave_no_doubt():
    confusion = images(5, 5, 5, 5)
    assert confusion.mean_iou() == pytest.approx(0.25)  # 5 / 10 and 0 / 5
    for low, high in confusion.intervals():
        assert (low, high) == (pytest.approx(0.25), pytest.approx(0.25))


def test_intervals_are_those_of_a_binomial():
    """Half of 100 images all right, half all wrong: the share right in a bootstrap is binomial(100, 1/2) / 100."""
    confusion = images(*[10, 0] * 50)
    data_set, per_image = confusion.intervals(seed=3, rounds=4000)
    # Per image 1 or 0 (both classes occur where it is wrong, with 0 each): the mean is the share, 0.40 to 0.60.
    assert per_image == (pytest.approx(0.40, abs=0.015), pytest.approx(0.60, abs=0.015))
    # Over the set class 0 has the share, class 1 nothing: half of it.
    assert data_set == (pytest.approx(0.20, abs=0.008), pytest.approx(0.30, abs=0.008))
    assert confusion.intervals(seed=3, rounds=4000) == (data_set, per_image)
    assert confusion.intervals(seed=4, rounds=50) != confusion.intervals(seed=3, rounds=50)


def test_what_was_counted_elsewhere_can_be_taken_in():
    apart, together = images(10, 2), images(10, 2, 7)
    other = images(7)
    apart.take_in(other.matrix, other.counts)
    assert torch.equal(apart.matrix, together.matrix)
    assert torch.equal(apart.counts, together.counts)


class Threshold(nn.Module):
    """Class 1 where the red channel is above one half, with a margin in proportion."""

    def forward(self, x: Tensor) -> Tensor:
        red = x[:, 0] - 0.5
        return torch.stack([-red, red], dim=1)


def test_pgd_moves_every_pixel_that_counts_the_wrong_way_and_no_other():
    x = torch.full((2, 3, 2, 2), 0.5)
    masks = torch.tensor([[[0, 1], [1, 0]], [[0, IGNORED], [IGNORED, 1]]])
    attack = PGD(Linf(0.1), OnPixels(), Steepest(0.05), steps=4, random_start=False, stop_when_fooled=False)
    z = attack(Threshold(), x, masks)
    wanted = torch.tensor([[[0.1, -0.1], [-0.1, 0.1]], [[0.1, 0.0], [0.0, -0.1]]])
    assert torch.allclose(z[:, 0] - 0.5, wanted, atol=1e-6)
    assert torch.equal(z[:, 1:], x[:, 1:])


def test_the_goal_is_each_images_own_mean_over_pixels_that_count():
    x = SampleRNG.of_samples(0, range(3)).uniform(3, 4, 4)
    masks = SampleRNG.of_samples(1, range(3)).integers(2, 4, 4)
    masks[0, :2], masks[2] = IGNORED, IGNORED
    model = Threshold()
    values, fooled = OnPixels()(model, x, masks).evaluate(x, 0.0)
    logits = model(x)
    for place in (0, 1):
        chosen = masks[place] != IGNORED
        expected = F.cross_entropy(logits[place].permute(1, 2, 0)[chosen], masks[place][chosen])
        assert values[place] == pytest.approx(float(expected), rel=1e-5)
    assert values[2] == 0
    assert not fooled.any()
    kept, _ = OnPixels()(model, x, masks).keep(torch.tensor([False, True, False])).evaluate(x[1:2], 0.0)
    assert kept == pytest.approx(values[1:2])
