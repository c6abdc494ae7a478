"""Patch-wise augmentation: each change by an independent computation, and both halves of a batch count alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from training_toys import FakeTraining

from small_recipes import recipe
from toys import images
from vitadel.backbones.classifier import wrap
from vitadel.errors import UserError
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG
from vitadel.training.data_stream import MicroBatch
from vitadel.training.interfaces import ChangesBatch
from vitadel.training.plugins.patch_augmentation import PatchAugmentation, augment_patches
from vitadel.training.recipes.check import check_model
from vitadel.training.run import run_harden

NOTHING = {"crop": 0.0, "noise": 0.0, "flip": 0.0}


def rng(count: int, seed: int = 0) -> SampleRNG:
    return SampleRNG.of_samples(seed, range(count))


def patches(x: Tensor, size: int) -> Tensor:
    """(images * patches, channels, size, size), one slice after the other."""
    return torch.stack(
        [
            image[:, top : top + size, left : left + size]
            for image in x
            for top in range(0, x.shape[2], size)
            for left in range(0, x.shape[3], size)
        ]
    )


def test_no_change_is_none():
    x = images(3, side=24)
    assert torch.equal(augment_patches(x, rng(3), 8, **NOTHING), x)
    whole = augment_patches(x, rng(3), 8, **{**NOTHING, "crop": 1.0}, scale=(1.0, 1.0))
    torch.testing.assert_close(whole, x, rtol=0, atol=1e-6)
    assert torch.equal(augment_patches(x, rng(3), 8, **{**NOTHING, "noise": 1.0}, noise_std=0.0), x)


def test_mirrored_patches_stay_where_they_are():
    x = images(2, side=24)[:, :, :16]
    mirrored = augment_patches(x, rng(2), 8, **{**NOTHING, "flip": 1.0})
    assert torch.equal(patches(mirrored, 8), patches(x, 8).flip(3))


def test_cuts_are_squares_inside_the_patch_of_the_right_area():
    """On a ramp, what was cut can be read off: the slope is the square's side, the values are its place."""
    size, count = 8, 200
    ramp = (torch.arange(size) + 0.5) / size  # the place of each pixel's middle
    down, right = ramp[:, None].expand(size, size), ramp.expand(size, size)
    x = torch.stack([down, right, torch.zeros(size, size)]).repeat(count, 1, 2, 3)
    found = patches(augment_patches(x, rng(count), size, **{**NOTHING, "crop": 1.0}), size)
    assert found.shape[0] == count * 6
    assert (found[:, 2] == 0).all()
    # The outermost pixels may have been continued; the fourth and fifth have not.
    for channel, middle, next_one in (
        (0, found[:, 0, 3, 3], found[:, 0, 4, 3]),
        (1, found[:, 1, 3, 3], found[:, 1, 3, 4]),
    ):
        side = (next_one - middle) * size
        start = (next_one + middle) / 2 - side / 2
        assert 0.85 - 1e-4 <= float(side.square().min()) < 0.86
        assert 0.99 < float(side.square().max()) <= 1 + 1e-4
        assert float(side.square().mean()) == pytest.approx(0.925, abs=0.005)
        assert float(start.min()) >= -1e-5
        assert float((start + side).max()) <= 1 + 1e-5
        share = start / (1 - side).clamp(min=1e-3)
        assert float(share[side < 0.99].mean()) == pytest.approx(0.5, abs=0.03)
        assert (found[:, channel].diff(dim=1 + channel) >= -1e-6).all()


def test_noise_is_as_large_as_it_should_be_in_each_channel():
    x = torch.full((60, 3, 16, 16), 0.5)
    std = torch.tensor([0.01, 0.02, 0.04]).view(1, 3, 1, 1)
    noise = augment_patches(x, rng(60), 8, **{**NOTHING, "noise": 1.0}, noise_std=std) - x
    assert noise.mean((0, 2, 3)).abs().max() < 0.001
    torch.testing.assert_close(noise.std((0, 2, 3)), std.flatten(), rtol=0.03, atol=0)
    assert len(set(noise[:, 0, 0, 0].tolist())) == 60
    assert augment_patches(images(4, side=16), rng(4), 8, noise=1.0, noise_std=0.5).min() == 0


@pytest.mark.slow
def test_a_tenth_of_the_patches_each():
    x = images(40, side=64)
    for only, expected in (("crop", 0.1), ("noise", 0.1), ("flip", 0.1), (None, 1 - 0.9**3)):
        settings = {} if only is None else {**NOTHING, only: 0.1}
        changed = patches(augment_patches(x, rng(40), 4, **settings), 4) != patches(x, 4)
        assert float(changed.flatten(1).any(1).float().mean()) == pytest.approx(expected, abs=0.01)


def test_an_image_is_varied_alike_in_any_batch_and_differently_with_another_seed():
    x = images(5, side=16)
    together = augment_patches(x, rng(5), 4)
    alone = torch.cat([augment_patches(x[i : i + 1], rng(5)[torch.tensor([i])], 4) for i in range(5)])
    assert torch.equal(together, alone)
    assert not torch.equal(augment_patches(x, rng(5, seed=1), 4), together)
    twice = augment_patches(x[:1].repeat(2, 1, 1, 1), rng(2), 4)
    assert not torch.equal(twice[0], twice[1])


# The plug-in


def test_a_batch_is_followed_by_its_varied_twin():
    std = (0.2, 0.4, 0.8)
    run = FakeTraining(nn.Sequential(wrap(nn.Identity(), mean=(0.5,), std=std)), step=3)
    plugin = PatchAugmentation(patch_size=8, crop=0, flip=0, noise=1)
    assert isinstance(plugin, ChangesBatch)
    x = 0.25 + 0.5 * images(50, side=16)
    part = MicroBatch(torch.arange(50), x, torch.arange(50) % 3)
    changed = plugin.change_batch(run, part)
    assert torch.equal(changed.x[:50], x)
    assert torch.equal(changed.y, part.y.repeat(2))
    assert torch.equal(changed.names[:50], part.names)
    assert len(set(changed.names.tolist())) == 100
    noise = (changed.x[50:] - x).std((0, 2, 3))  # 0.01 after normalizing
    torch.testing.assert_close(noise, 0.01 * torch.tensor(std), rtol=0.05, atol=0)
    assert torch.equal(plugin.change_batch(run, part).x, changed.x)
    run.step = 4
    assert not torch.equal(plugin.change_batch(run, part).x, changed.x)


def trained(folder: Path, **changes) -> dict[str, Tensor]:
    plain = {"objective": {"use": "standard"}, "augmentation": {"mixup": 0.5}, "train": {"epochs": 1}}
    run_harden(recipe(**{**plain, **changes}), "small", join_processes("cpu"), out=folder)
    return load_file(folder / "weights" / "last.safetensors")


@pytest.mark.slow
def test_both_halves_count_alike(tmp_path):
    """A twin that is the same image changes neither mean loss nor weights; one that is another image does."""

    def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return max(float((one[key] - other[key]).abs().max()) for key in one)

    alone = trained(tmp_path / "alone")
    same = trained(tmp_path / "same", plugins={"patch_augmentation": {"patch_size": 8, **NOTHING}})
    varied = trained(tmp_path / "varied", plugins={"patch_augmentation": {"patch_size": 8, "flip": 1}})
    assert apart(alone, same) < 1e-4
    assert apart(alone, varied) > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flip": 1.5}, r"flip must be in \[0, 1\], got 1.5"),
        ({"patch_size": 0}, "patch_size must be at least 1"),
        ({"noise_std": -1.0}, "noise_std must be a finite number of at least 0"),
        ({"scale": (1.0, 0.9)}, r"the smaller one first, got \[1.0, 0.9\]"),
        ({"scale": (0.0, 0.9)}, "two shares of a patch's area"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError, match=message):
        PatchAugmentation(**settings)


def test_patches_that_leave_a_rest_are_reported_before_training():
    message = "16 x 16 pixels cannot be cut into patches of 6 to augment; set patch_size .* divisor of 16"
    with pytest.raises(UserError, match=message):
        augment_patches(images(1, side=16), rng(1), 6)
    with pytest.raises(UserError, match=message):
        check_model(recipe(plugins={"patch_augmentation": {"patch_size": 6}}), "small")
