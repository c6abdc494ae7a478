"""Perturbation sequences: frames as other libraries make them, and how they hang together."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from corruption_pictures import array, assert_levels_agree, pictures
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from vitadel.corruptions import (
    CIFAR_SEQUENCES,
    IMAGENET_SEQUENCES,
    NOISE_SEQUENCES,
    VALIDATION_SEQUENCES,
    sequence,
)
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

ALL = tuple(dict.fromkeys((*IMAGENET_SEQUENCES, *VALIDATION_SEQUENCES)))
EACH = pytest.mark.parametrize("name", ALL)


def crop(image: np.ndarray, side: int) -> np.ndarray:
    return np.array(TF.center_crop(Image.fromarray(image), [side, side]))


def test_the_lists_are_the_benchmarks():
    assert len(IMAGENET_SEQUENCES) == len(CIFAR_SEQUENCES) == 10
    assert set(IMAGENET_SEQUENCES) ^ set(CIFAR_SEQUENCES) == {"snow", "spatter"}
    assert IMAGENET_SEQUENCES.index("snow") == CIFAR_SEQUENCES.index("spatter") == 4


@EACH
def test_frames_are_whole_levels_and_belong_to_the_sample(name):
    x, rng = pictures(3, 32, 32), SampleRNG.of_samples(0, [1, 2, 3])
    frames = sequence(x, name, rng)
    assert frames.shape == ({"motion_blur": 21, "translate": 16}.get(name, 31), 3, 3, 32, 32)
    assert torch.equal(frames.mul(255).round().div(255), frames)
    last = torch.tensor([2])
    assert torch.equal(sequence(x[last], name, rng[last]), frames[:, last])
    assert all(not torch.equal(one, other) for one, other in pairwise(frames))


@pytest.mark.parametrize("name", ["translate", "snow", "motion_blur"])
def test_imagenets_pictures_are_cropped(name):
    frames = sequence(pictures(1, 256, 320), name)
    assert frames.shape == (41 if name == "translate" else 31, 1, 3, 224, 224)
    assert sequence(pictures(1, 64, 80), name).shape[-2:] == (56, 56)


@pytest.mark.parametrize(("name", "clean"), [*((name, 0) for name in (*NOISE_SEQUENCES, "zoom_blur")), ("rotate", 15)])
def test_one_frame_is_the_image_itself(name, clean):
    x = pictures(2, 128, 128)
    assert torch.equal(sequence(x, name)[clean], x[:, :, 8:120, 8:120])


@pytest.mark.parametrize(("name", "clean"), [("translate", 7), ("scale", 15), ("shear", 15)])
def test_motions_pass_through_the_image_itself(name, clean):
    x = pictures(2, 32, 32)
    assert torch.equal(sequence(x, name)[clean], x)


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width", "side"), [(256, 300, 224), (32, 32, 32)])
@pytest.mark.parametrize("frame", [0, 9, 15])
@pytest.mark.parametrize("name", ["translate", "rotate", "scale", "shear"])
def test_motions_are_torchvisions_on_pillow(name, frame, height, width, side):
    x = pictures(1, height, width)
    settings = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
    settings |= {
        "translate": {"translate": [frame - (20 if side == 224 else 7), 0]},
        "rotate": {"angle": frame - 15},
        "scale": {"scale": (40 + 2.5 * frame) / 100 if side == 224 else (70 + 2 * frame) / 100},
        "shear": {"shear": [frame - 15, 0.0]},
    }[name]
    moved = TF.affine(Image.fromarray(array(x[0])), interpolation=InterpolationMode.BILINEAR, **settings)
    assert_levels_agree(array(sequence(x, name)[frame, 0]), crop(np.array(moved), side), 0.01)


@pytest.mark.parametrize(("height", "width", "side", "step"), [(256, 300, 224, 1.0), (32, 32, 32, 0.75)])
@pytest.mark.parametrize("frame", [0, 11, 30])
def test_tilting_is_opencvs(frame, height, width, side, step):
    cv2 = pytest.importorskip("cv2")
    x = pictures(1, height, width)
    angle, focal = math.radians((frame - 15) * step), math.hypot(height, width)
    cos, sin = math.cos(angle), math.sin(angle)
    flat = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1], [0, 0, 1]])
    about_x = np.array([[1, 0, 0, 0], [0, cos, -sin, 0], [0, sin, cos, 0], [0, 0, 0, 1]])
    about_y = np.array([[cos, 0, -sin, 0], [0, 1, 0, 0], [sin, 0, cos, 0], [0, 0, 0, 1]])
    away = np.eye(4)
    away[2, 3] = focal
    lens = np.array([[focal, 0, width / 2, 0], [0, focal, height / 2, 0], [0, 0, 1, 0]])
    expected = cv2.warpPerspective(array(x[0]), lens @ away @ about_x @ about_y @ flat, (width, height))
    ours = array(sequence(x, "tilt")[frame, 0]).astype(int)
    assert np.abs(ours - crop(expected, side)).mean() < 1.0  # OpenCV may look positions up in steps of 1/32 pixel


def test_a_shift_moves_pixels_and_leaves_black():
    x = pictures(1, 32, 32)
    frames = sequence(x, "translate")
    assert torch.equal(frames[10][..., 3:], x[..., :-3])
    assert (frames[10][..., :3] == 0).all()


@pytest.mark.parametrize("name", NOISE_SEQUENCES)
def test_noise_grows_with_difficulty_and_frames_are_independent(name):
    x = torch.full((2, 3, 32, 32), 0.5)
    spreads = []
    for difficulty in (1, 2, 3):
        change = sequence(x, name, difficulty=difficulty)[1:] - x
        spreads.append(change.std().item())
        assert abs(torch.corrcoef(change[:2].flatten(1))[0, 1]) < 0.06
    assert spreads == sorted(spreads)
    expected = {"gaussian_noise": 0.02, "shot_noise": (0.5 / 700) ** 0.5, "speckle_noise": 0.025}[name]
    assert spreads[0] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["brightness", "rotate", "snow"])
def test_difficulty_changes_nothing_else(name):
    x, rng = pictures(1, 32, 32), SampleRNG.of_samples(0, [0])
    assert torch.equal(sequence(x, name, rng, 1), sequence(x, name, rng, 3)) == (name != "snow")


def test_brightness_rises_by_hand():
    x = torch.full((1, 3, 32, 32), 100 / 255)
    levels = sequence(x, "brightness").mul(255).round()[:, 0, 0, 0, 0]
    assert levels[[0, 14, 16, 30]].tolist() == [42, 96, 103, 157]  # 100 + 3.825 (frame - 15), cut


def test_zoom_blur_is_the_running_mean_of_enlargements():
    x = pictures(1, 32, 32)
    frames = sequence(x, "zoom_blur")
    layers = [
        np.array(
            TF.affine(Image.fromarray(array(x[0])), 0, [0, 0], 1 + 0.004 * i, [0.0, 0.0], InterpolationMode.BILINEAR)
        ).astype(float)
        for i in range(6)
    ]
    assert_levels_agree(array(frames[5, 0]), np.uint8(np.mean(layers, axis=0) + 1e-9), 0.01)


def test_water_runs_down():
    x = torch.zeros(1, 3, 32, 32)
    wet = sequence(x, "spatter", SampleRNG.of_samples(0, [0])).sum(2)[:, 0]
    rows = torch.arange(32.0)[:, None]
    centre = [(frame * rows).sum() / frame.sum() for frame in (wet[0], wet[6])]
    assert centre[1] > centre[0] + 1


def test_gaussian_blur_is_scikit_images():
    filters = pytest.importorskip("skimage.filters")
    x = pictures(1, 32, 32)
    frames = sequence(x, "gaussian_blur")
    for frame in (0, 30):
        soft = filters.gaussian(array(x[0]) / 255, sigma=0.3 + 0.015 * frame, channel_axis=-1, truncate=7)
        assert_levels_agree(array(frames[frame, 0]), np.uint8(255 * soft))


def test_what_is_not_a_sequence_is_reported():
    x = pictures(1, 32, 32)
    with pytest.raises(UserError, match="did you mean"):
        sequence(x, "rotation")
    with pytest.raises(UserError, match="difficulty of a sequence is 1, 2 or 3, got 4"):
        sequence(x, "rotate", difficulty=4)
    with pytest.raises(UserError, match="at least 8 pixels"):
        sequence(pictures(1, 7, 32), "rotate")
