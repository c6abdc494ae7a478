"""Each step does what its name says, stays in the box of pixels, and draws from its own seed."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from vitadel.data.batches import Preprocess
from vitadel.errors import UserError
from vitadel.training.data_stream import make_augment, make_mixup, seed_everything
from vitadel.training.recipes.training_sections import Augmentation

RAMP = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))
PIXELS = torch.from_numpy(np.array(RAMP)).permute(2, 0, 1)
SAME = Preprocess(16)


def test_nothing_asked_for_changes_nothing():
    assert torch.equal(make_augment(Augmentation(), SAME)(RAMP, 3), PIXELS)


def test_a_certain_flip_mirrors():
    assert torch.equal(make_augment(Augmentation(hflip=1.0), SAME)(RAMP, 3), PIXELS.flip(2))


def test_half_of_the_pictures_are_mirrored():
    flip = make_augment(Augmentation(hflip=0.5), SAME)
    mirrored = sum(torch.equal(flip(RAMP, seed), PIXELS.flip(2)) for seed in range(400))
    assert 160 < mirrored < 240


def test_a_padded_crop_is_a_window_of_the_padded_picture():
    padded = torch.nn.functional.pad(PIXELS, (2, 2, 2, 2))
    windows = {padded[:, i : i + 16, j : j + 16].numpy().tobytes() for i in range(5) for j in range(5)}
    crop = make_augment(Augmentation(crop="pad", padding=2), SAME)
    got = {crop(RAMP, seed).numpy().tobytes() for seed in range(300)}
    assert got == windows


def test_erasing_paints_a_rectangle_in_the_mean_color():
    erased = make_augment(Augmentation(reprob=1.0), Preprocess(16, mean=(0.5, 0.25, 1.0)))(RAMP, 1)
    changed = (erased != PIXELS).any(0)
    rows, columns = changed.any(1).nonzero()[:, 0], changed.any(0).nonzero()[:, 0]
    box = erased[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    assert (box == torch.tensor([128, 64, 255], dtype=torch.uint8)[:, None, None]).all()


def test_a_model_of_raw_pixels_does_not_make_black_the_mean_color():
    erased = make_augment(Augmentation(reprob=1.0), Preprocess(16, mean=(0.0, 0.0, 0.0)))(RAMP, 1)
    assert (erased == torch.tensor([124, 116, 104])[:, None, None]).all(0).any()


@pytest.mark.parametrize(
    "section",
    [
        Augmentation(crop="resized", color_jitter=0.4, hflip=0.5, rotation=2),
        Augmentation(crop="resized", scale=(0.8, 1.2), ratio=(0.95, 1.05)),
        Augmentation(crop="pad", auto_augment="rand-m9-mstd0.5-inc1", reprob=0.25),
    ],
)
def test_a_seed_decides_everything_and_pixels_have_the_models_size(section):
    varied = make_augment(section, Preprocess(8))
    seed_everything(99)
    first = varied(RAMP, 5)
    assert (first.dtype, first.shape) == (torch.uint8, (3, 8, 8))
    assert torch.equal(first, varied(RAMP, 5))
    assert any(not torch.equal(first, varied(RAMP, seed)) for seed in range(6, 12))


@pytest.mark.parametrize(
    "section",
    [
        Augmentation(crop="resized", color_jitter=0.4, hflip=0.5, rotation=2, reprob=0.5),
        Augmentation(crop="pad", auto_augment="rand-m9-mstd0.5-inc1", reprob=0.25),
    ],
)
def test_worker_processes_get_the_same_by_pickle(section):
    varied = make_augment(section, Preprocess(8))
    sent = pickle.loads(pickle.dumps(varied))
    for seed in range(8):
        assert torch.equal(sent(RAMP, seed), varied(RAMP, seed))


def test_color_jitter_also_acts_beside_randaugment():
    policy = "rand-m0-n0-inc1"  # RandAugment that changes nothing
    alone = make_augment(Augmentation(auto_augment=policy), SAME)
    assert torch.equal(alone(RAMP, 3), PIXELS)
    jitter = Augmentation(auto_augment=policy, color_jitter=0.4)
    assert all(not torch.equal(make_augment(jitter, SAME)(RAMP, seed), PIXELS) for seed in range(5))


def test_mixing_makes_probabilities_of_labels():
    mix = make_mixup(Augmentation(mixup=0.8, cutmix=1.0), num_classes=4)
    seed_everything(0)
    x, y = torch.rand(6, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    mixed, soft = mix(x.clone(), y)
    assert soft.shape == (6, 4)
    assert torch.allclose(soft.sum(1), torch.ones(6))
    assert mixed.min() >= 0
    assert mixed.max() <= 1
    assert not torch.equal(mixed, x)
    assert make_mixup(Augmentation(), 4) is None


def test_a_policy_that_timm_cannot_read_is_reported():
    with pytest.raises(UserError, match="rand-m9"):
        make_augment(Augmentation(auto_augment="random-9"), SAME)
