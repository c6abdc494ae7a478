"""The grid of patches, the threat on it, and noise in random patches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from toys import TinyNet, images
from vitadel.attacks.goals import Changed, OnLogits, Surrogate
from vitadel.attacks.losses import margin
from vitadel.attacks.patches.patch_threat import (
    Patches,
    changed_patches,
    count_of_share,
    cut,
    patch_grid_of,
    patch_side_of,
    pixel_mask,
    strongest,
)
from vitadel.attacks.patches.random_patches import RandomPatches, uniform_noise
from vitadel.attacks.pgd import PGD
from vitadel.attacks.threats import L2, Linf
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import count_passes, judge
from vitadel.instrument import scaled_attention
from vitadel.runtime.rng import SampleRNG
from vits import VITS, make_vit, pixels

SIDES = {name: 8 for name in VITS if name != "pit"} | {"swin": 4, "swinv2": 4, "levit": 16, "levit_conv": 16}


def numbered(rows: int, columns: int, side: int) -> Tensor:
    """An image whose pixels are the number of their patch."""
    numbers = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    return numbers.repeat_interleave(side, 0).repeat_interleave(side, 1).expand(2, 3, -1, -1)


def test_patches_are_numbered_row_by_row():
    tiles = cut(numbered(2, 3, 4), 4)
    assert tiles.shape == (2, 6, 48)
    assert torch.equal(tiles, torch.arange(6.0)[None, :, None].expand_as(tiles))


def test_a_mask_of_patches_becomes_one_of_pixels():
    chosen = torch.tensor([[0, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.bool)
    x = numbered(2, 3, 4)
    mask = pixel_mask(chosen, x, 4)
    assert mask.shape == (2, 1, 8, 12)
    assert torch.equal(mask[0], x[0, :1] == 4)
    assert torch.equal(mask[1], x[1, :1] == 0)
    assert torch.equal(changed_patches(x + 0.5 * mask, x, 4), chosen)


def test_the_strongest_are_exactly_as_many_also_when_all_are_equal():
    assert strongest(torch.zeros(1, 5), 2).tolist() == [[True, True, False, False, False]]
    assert strongest(torch.tensor([[1.0, 3.0, 2.0, 3.0]]), 3).tolist() == [[False, True, True, True]]
    assert strongest(torch.zeros(1, 5), 0).sum() == 0


def test_a_share_is_rounded_and_only_nothing_is_nothing():
    assert [count_of_share(0.1, patches) for patches in (196, 64, 49, 4)] == [20, 6, 5, 1]
    assert count_of_share(0.0, 196) == 0


@pytest.mark.parametrize("name", SIDES)
def test_the_side_is_read_off_the_first_block(name):
    grid = patch_grid_of(make_vit(name), pixels(name))
    assert grid.side == SIDES[name]
    assert grid.rows == grid.columns == VITS[name].size // SIDES[name]
    assert grid.prefix == VITS[name].prefix


def test_oblong_images_have_an_oblong_grid():
    grid = patch_grid_of(make_vit("vit", img_size=(16, 64)), torch.rand(1, 3, 16, 64))
    assert (grid.rows, grid.columns, grid.side, grid.tokens) == (2, 8, 8, 17)


def test_reading_the_side_is_no_query_and_leaves_no_trace():
    model = make_vit("vit").train()
    deployed = wrap(model)
    wrapped = Surrogate(Changed(deployed, lambda inner: scaled_attention(inner, 0.5)), deployed)
    with count_passes(wrapped) as cost:
        assert patch_side_of(wrapped, pixels("vit")) == 8
    assert (cost.gradients, cost.forwards) == (0, 0)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in wrapped.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_overlapping_patches_are_no_grid():
    with pytest.raises(UserError, match=r"do not tile images of 32 x 32 pixels.*side=16"):
        patch_side_of(make_vit("pit"), pixels("pit"))


def test_a_model_without_patches_is_refused():
    with pytest.raises(UserError, match=r"not known here: no anatomy known for .*TinyNet.*side=16"):
        RandomPatches(Linf(0.1))(TinyNet().eval(), images(2), torch.zeros(2, dtype=torch.long))


def test_a_side_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="8 x 8 pixels cannot be cut into patches of side 3"):
        RandomPatches(Linf(0.1), side=3)(TinyNet().eval(), images(2), torch.zeros(2, dtype=torch.long))


def three_changes() -> tuple[Tensor, Tensor]:
    """Gray images; patch 1 changes by .1 everywhere, patch 7 by .3 in one pixel, patch 10 by .02 everywhere."""
    x = torch.full((2, 3, 16, 16), 0.5)
    z = x.clone()
    z[:, :, 0:4, 4:8] += 0.1
    z[:, 0, 5, 13] -= 0.3
    z[:, :, 8:12, 8:12] += 0.02
    return x, z


def test_projection_keeps_the_strongest_patches_and_restores_the_rest():
    x, z = three_changes()
    assert Patches(3, 4).size(z, x).tolist() == [3.0, 3.0]
    kept = Patches(2, 4).project(z, x)
    # Squared lengths: 48 * .01 = .48, .09, 48 * .0004 = .0192.
    assert changed_patches(kept, x, 4).nonzero()[:, 1].tolist() == [1, 7, 1, 7]
    assert torch.equal(kept[:, :, :8], z[:, :, :8])
    assert torch.equal(kept[:, :, 8:], x[:, :, 8:])
    assert torch.equal(Patches(2, 4).project(kept, x), kept)
    assert torch.equal(Patches(0, 4).project(z, x), x)
    assert torch.equal(Patches(3, 4).project(z + 5 * (z - x), x), (z + 5 * (z - x)).clamp(0, 1))


def test_rounding_is_no_change_and_everything_above_is():
    x = torch.full((1, 3, 8, 8), 0.25, dtype=torch.float64)
    z = x.clone()
    z[0, 0, 0, 0] += 5e-8
    z[0, 0, 0, 7] += 2e-7
    assert Patches(1, 4).size(z, x).item() == 1


@pytest.mark.parametrize("ball", [Linf(0.05), L2(0.3)])
def test_the_mild_ball_binds_and_breaking_it_shows(ball):
    x, z = three_changes()
    mild = Patches(2, 4, ball)
    kept = mild.project(z, x)
    assert ball.size(kept, x).max() <= ball.eps + 1e-6
    assert mild.size(kept, x).tolist() == [2.0, 2.0]
    assert torch.isinf(mild.size(Patches(2, 4).project(z, x), x)).all()
    assert judge(Grey(), mild, x, Patches(2, 4).project(z, x), torch.zeros(2, dtype=torch.long)).void.all()
    assert not judge(Grey(), mild, x, kept, torch.zeros(2, dtype=torch.long)).void.any()


class Grey(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.mean((1, 2, 3)), 1 - x.mean((1, 2, 3))], 1)


@pytest.mark.parametrize("surface", [False, True])
@pytest.mark.parametrize("ball", [None, Linf(0.05), L2(0.3)])
def test_random_starts_obey(ball, surface):
    x = 0.4 + 0.2 * images(20, side=16)
    rules = Patches(3, 4, ball)
    z = rules.random(x, SampleRNG.of_samples(0, range(20)), surface)
    assert (rules.size(z, x) == 3).all()
    assert z.min() >= 0
    assert z.max() <= 1
    assert changed_patches(z, x, 4).any(0).all()  # every patch has its turn
    if surface and ball is None:
        assert ((z == x) | (z == 0) | (z == 1)).all()
    if surface and ball is not None:
        assert torch.allclose(ball.size(z, x), torch.full((20,), ball.eps, dtype=torch.float64), atol=1e-5)


class Linear(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        score = (x * self.weight).sum((1, 2, 3))
        return torch.stack([torch.zeros_like(score) + 1e6, score], 1)  # never fooled, so the search goes to its end


@pytest.mark.parametrize("ball", [None, Linf(0.1), L2(0.4)])
def test_pgd_in_patches_finds_the_best_patch_of_a_linear_model(ball):
    weight = SampleRNG.of_samples(0, [0]).normal(3, 16, 16)[0]
    x = torch.full((1, 3, 16, 16), 0.5)
    rules = Patches(1, 4, ball)
    z = PGD(rules, OnLogits(margin), steps=20, random_start=False)(Linear(weight), x, torch.zeros(1, dtype=torch.long))
    assert rules.size(z, x) <= 1
    tiles = cut(weight[None], 4)[0]
    best = tiles.abs().sum(1).argmax()
    gain = ((z - x) * weight).sum()
    if isinstance(ball, L2):
        assert gain == pytest.approx(0.4 * tiles[best].norm().item(), rel=1e-3)
    else:
        assert gain == pytest.approx((0.5 if ball is None else 0.1) * tiles[best].abs().sum().item(), rel=1e-4)


def test_noise_is_drawn_in_the_space_that_the_model_normalizes_to():
    model = wrap(Grey(), mean=(0.1, 0.4, 0.9), std=(0.2, 0.5, 0.3))
    x, rng = images(30, side=16), SampleRNG.of_samples(0, range(30))
    noise = uniform_noise(model, x, rng)
    low, high = noise.amin((0, 2, 3)), noise.amax((0, 2, 3))
    assert torch.allclose(low, torch.tensor([0.1, 0.4, 0.9]), atol=2e-3)
    assert torch.allclose(high, torch.tensor([0.3, 0.9, 1.0]), atol=2e-3)  # the box ends the last
    assert uniform_noise(model, x, rng, "pixel").amax((0, 2, 3)).min() > 0.99
    assert torch.equal(uniform_noise(Grey(), x, rng), uniform_noise(Grey(), x, rng, "pixel"))


def test_random_patches_replace_the_share_they_say():
    model, x = make_vit("vit"), pixels("vit", 12)
    y = model(x).argmax(1)
    attack = RandomPatches(Linf(8 / 255), share=0.25, masks=3)
    z = attack(model, x, y)
    rules = attack.rules(model, x)
    assert rules == Patches(4, 8)
    assert (rules.size(z, x) == 4).all()
    inside = pixel_mask(changed_patches(z, x, 8), x, 8).expand_as(x)
    assert (z != x)[inside].float().mean() > 0.999  # all of a chosen patch, all channels
    assert changed_patches(z, x, 8).any(0).all()


def test_more_masks_are_never_better_for_the_model():
    model, x = make_vit("vit"), pixels("vit", 12)
    y = model(x).argmax(1)
    rng = SampleRNG.of_samples(5, range(12))
    worst = [margin(model(RandomPatches(Linf(1.0), 0.1, masks)(model, x, y, rng)), y) for masks in (1, 4, 16)]
    for before, after in pairwise(worst):
        assert ((after >= before - 1e-5) | (before > 0)).all()  # who is fooled is not made worse
        assert (after > before + 1e-3).any()


def test_random_patches_run_on_any_model_with_a_side():
    model, x = TinyNet().eval(), images(6)
    z = RandomPatches(Linf(0.1), share=0.25, side=4)(model, x, model(x).argmax(1))
    assert (Patches(1, 4).size(z, x) == 1).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": 0.0}, r"in \(0, 1\], got 0"),
        ({"share": 1.5}, r"in \(0, 1\], got 1.5"),
        ({"masks": 0}, "at least 1 mask"),
        ({"noise": "pixels"}, "did you mean pixel"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        RandomPatches(Linf(0.1), **settings)


def test_a_threat_needs_a_side():
    with pytest.raises(UserError, match="side >= 1"):
        Patches(1, 0)
