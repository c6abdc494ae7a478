"""The door to the corruptions: what holds for all of them, and what it refuses."""

from __future__ import annotations

import importlib.util
import warnings

import pytest
import torch
from corruption_pictures import array, pictures

from vitadel.backbones import load_model
from vitadel.corruptions import COMMON, EXTRA, SEVERITIES, TABLES, Table, corrupt, minimum_size, weather
from vitadel.corruptions.constants import table_for
from vitadel.data.sources.shapes import Shapes
from vitadel.errors import UserError
from vitadel.runtime.rng import SampleRNG

HAS_FROST = importlib.util.find_spec("imagecorruptions") is not None
ALL = [name for name in (*COMMON, *EXTRA) if HAS_FROST or name != "frost"]
EACH = pytest.mark.parametrize("name", ALL)


def test_there_are_fifteen_and_four_and_a_full_table_for_each_size():
    assert (len(COMMON), len(EXTRA)) == (15, 4)
    for table in TABLES.values():
        assert set(table.rows) == {*COMMON, *EXTRA}
        assert all(len(rows) == 5 and len({len(row) for row in rows}) == 1 for rows in table.rows.values())


@EACH
def test_the_result_is_whole_levels_and_belongs_to_the_sample(name):
    x = pictures(5, 32, 32)
    before = x.clone()
    rng = SampleRNG.of_samples(0, [4, 8, 15, 16, 23])
    for severity in SEVERITIES:
        y = corrupt(x, name, severity, rng)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert torch.equal(y.mul(255).round().div(255), y)
        assert not torch.equal(y, x)
        assert torch.equal(y, corrupt(x, name, severity, rng))
        order = torch.tensor([3, 0])
        assert torch.equal(corrupt(x[order], name, severity, rng[order]), y[order])
        one = torch.tensor([4])
        assert torch.equal(corrupt(x[one], name, severity, rng[one]), y[one])
    assert torch.equal(x, before)


@EACH
def test_a_batch_beyond_one_piece_is_the_same_as_its_images(name):
    x = pictures(2, 256, 272)  # larger than what is worked on at once
    rng = SampleRNG.of_samples(0, range(2))
    y = corrupt(x, name, 5, rng)
    assert torch.equal(corrupt(x[1:], name, 5, rng[torch.tensor([1])]), y[1:])


@EACH
@pytest.mark.parametrize(("height", "width"), [(24, 40), (65, 64), (100, 150)])
def test_images_need_not_be_square(name, height, width):
    x = pictures(2, height, width)
    y = corrupt(x, name, 3)
    assert y.shape == x.shape
    assert y.isfinite().all()
    assert 0 < (y - x).abs().mean() < 0.6


@EACH
def test_how_pixels_lie_in_memory_does_not_matter(name):
    x = pictures(3, 32, 36)
    expected = corrupt(x, name, 4)
    assert torch.equal(corrupt(x.to(memory_format=torch.channels_last), name, 4), expected)
    assert torch.equal(corrupt(x.repeat(1, 1, 2, 2)[:, :, :32, :36], name, 4), expected)


@EACH
def test_the_smallest_images_are_taken_and_smaller_ones_refused(name):
    side = minimum_size(name)
    assert corrupt(pictures(1, side, side), name, 5).shape == (1, 3, side, side)
    if side > 1:
        with pytest.raises(UserError, match=f"at least {side} pixels"):
            corrupt(pictures(1, side, side - 1), name, 5)


@pytest.mark.parametrize("name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur"])
def test_more_is_worse(name):
    x = pictures(8, 64, 64)
    harm = [(corrupt(x, name, severity) - x).square().mean().item() for severity in SEVERITIES]
    assert harm == sorted(harm)
    assert len(set(harm)) == 5


@pytest.mark.parametrize("level", [0, 7, 128, 254, 255])
@pytest.mark.parametrize(
    "name", ["gaussian_blur", "glass_blur", "motion_blur", "elastic_transform", "pixelate", "contrast"]
)
def test_what_only_moves_or_averages_leaves_a_flat_image_alone(name, level):
    x = torch.full((1, 3, 96, 80), level / 255)
    for size in TABLES:
        for severity in SEVERITIES:
            assert torch.equal(corrupt(x, name, severity, constants=size), x), (size, severity)


def test_brightness_and_contrast_by_hand():
    x = torch.tensor([100, 50, 0]).view(1, 3, 1, 1).expand(1, 3, 4, 4) / 255
    levels = corrupt(x, "brightness", 1, constants=224).mul(255).round()[0, :, 0, 0]
    assert levels.tolist() == [125, 62, 0]  # 100 + 25.5, and half of it
    x = torch.tensor([0.0, 200 / 255]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    levels = corrupt(x, "contrast", 2, constants=32).mul(255).round()[0, 0, 0]
    assert levels.tolist() == [50, 150]


def test_samples_without_indices_are_keyed_by_their_pixels():
    x = pictures(3, 32, 32)
    y = corrupt(x, "gaussian_noise", 1)
    assert torch.equal(corrupt(x.flip(0), "gaussian_noise", 1).flip(0), y)
    assert not torch.equal(y[0] - x[0], y[1] - x[1])


def test_global_generators_are_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for name in ALL:
        corrupt(pictures(1, 32, 32), name, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(8, 8, 32), (32, 500, 32), (48, 48, 32), (49, 60, 64), (144, 144, 64), (145, 200, 224), (600, 400, 224)],
)
def test_the_table_is_that_of_the_nearest_size(height, width, size):
    assert table_for(height, width).size == size


def test_constants_can_be_chosen_and_made():
    x = pictures(1, 32, 32)
    assert torch.equal(corrupt(x, "contrast", 1, constants=224), corrupt(x, "contrast", 1, constants=TABLES[64]))
    assert not torch.equal(corrupt(x, "contrast", 1, constants=224), corrupt(x, "contrast", 1))
    own = Table(32, {**TABLES[32].rows, "impulse_noise": ((0.0,),) * 5})
    assert torch.equal(corrupt(x, "impulse_noise", 1, constants=own), x)
    with pytest.raises(UserError, match="224, 64, 32 pixels, not for 96"):
        corrupt(x, "contrast", 1, constants=96)


def test_float64_stays_float64_and_no_images_stay_none():
    assert corrupt(pictures(1, 32, 32).double(), "fog", 1).dtype == torch.float64
    assert corrupt(torch.empty(0, 3, 32, 32), "fog", 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("severity", [0, 6, -1, 2.5, True, "3"])
def test_severities_are_one_to_five(severity):
    with pytest.raises(UserError, match="1, 2, 3, 4 or 5"):
        corrupt(pictures(1, 8, 8), "fog", severity)


def test_what_cannot_be_corrupted_is_reported():
    x = pictures(2, 32, 32)
    with pytest.raises(UserError, match="did you mean gaussian_noise, gaussian_blur"):
        corrupt(x, "gausian_noise", 1)
    with pytest.raises(UserError, match="unknown corruption 'smoke'"):
        minimum_size("smoke")
    with pytest.raises(UserError, match="shape"):
        corrupt(x[:, :1], "fog", 1)
    with pytest.raises(UserError, match=r"float32 or float64.*uint8"):
        corrupt(x.mul(255).byte(), "fog", 1)
    with pytest.raises(UserError, match=r"in \[0, 1\], got .* to 2.*"):
        corrupt(x * 255, "fog", 1)
    with pytest.raises(UserError, match="got nan"):
        corrupt(x * float("nan"), "fog", 1)
    with pytest.raises(UserError, match="rng for 3 samples was given for 2 images"):
        corrupt(x, "fog", 1, SampleRNG.of_samples(0, range(3)))


def test_without_photos_only_frost_is_missing(monkeypatch):
    monkeypatch.setattr(weather.importlib.util, "find_spec", lambda name: None)
    weather._frost_original.cache_clear()
    weather.frost_photo.cache_clear()
    with pytest.raises(UserError, match="pip install imagecorruptions-imaug"):
        corrupt(pictures(1, 32, 32), "frost", 1)
    assert corrupt(pictures(1, 32, 32), "snow", 1).shape == (1, 3, 32, 32)


@pytest.mark.skipif(not HAS_FROST, reason="needs imagecorruptions-imaug")
@pytest.mark.parametrize(("height", "width"), [(224, 224), (330, 330), (400, 1000)])
def test_photos_are_enlarged_where_they_would_not_cover(height, width):
    x = torch.zeros(1, 3, height, width)
    assert (corrupt(x, "frost", 5) > 0).float().mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gaussian_noise", "fog", "motion_blur", "jpeg_compression"])
def test_a_model_is_as_accurate_on_ours_as_on_the_peers(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("imagecorruptions")
    model = load_model("zoo:shapes-standard").eval()
    count = 200
    pixels, labels, _ = Shapes(size=model.record.input_size[0]).render(range(count))
    x = pixels.float() / 255
    theirs = torch.stack([torch.tensor(peer.corrupt(array(image), 2, name)).permute(2, 0, 1) / 255 for image in x])
    ours = corrupt(x, name, 2, SampleRNG.of_samples(0, range(count)), constants=224)
    with torch.no_grad():
        held = [(model(images).argmax(1) == labels).float() for images in (ours, theirs)]
    # The same images: only those on which the two differ can make a difference, and each is a fair coin.
    differ = (held[0] != held[1]).sum().item()
    assert abs((held[0] - held[1]).sum().item()) <= 4 * differ**0.5 + 1


@EACH
def test_only_what_is_random_asks_for_draws(name):
    x = pictures(2, 32, 32)
    one, other = (corrupt(x, name, 5, SampleRNG.of_samples(seed, range(2))) for seed in (0, 1))
    fixed = {"defocus_blur", "gaussian_blur", "zoom_blur", "brightness", "contrast", "saturate", "pixelate"}
    fixed.add("jpeg_compression")
    assert torch.equal(one, other) == (name in fixed)
    assert torch.equal(corrupt(x, name, 5), corrupt(x, name, 5))
    assert torch.equal(corrupt(x, name, 5), one) == (name in fixed)
