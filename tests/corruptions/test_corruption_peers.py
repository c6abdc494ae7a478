"""Each corruption against another implementation: as a whole where nothing is random, else from the same noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from corruption_pictures import array, assert_levels_agree, pictures
from PIL import Image

from vitadel.corruptions import blur, corrupt, digital, filtering, spatter, weather
from vitadel.corruptions.weather import PHOTOS, frost_photo
from vitadel.runtime.rng import SampleRNG

cv2 = pytest.importorskip("cv2")
ndimage = pytest.importorskip("scipy.ndimage")
filters = pytest.importorskip("skimage.filters")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peer = pytest.importorskip("imagecorruptions")
    parts = pytest.importorskip("imagecorruptions.corruptions")

SEVERITIES = pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])


@SEVERITIES
@pytest.mark.parametrize(
    ("name", "apart"),
    [
        ("brightness", 0),
        ("saturate", 0),
        ("contrast", 1e-4),
        ("gaussian_blur", 1e-3),
        ("defocus_blur", 1e-3),
        ("pixelate", 0),
        ("jpeg_compression", 0),
    ],
)
def test_what_is_not_random_is_what_the_peer_makes(name, apart, severity):
    x = pictures(2, 96, 71)
    ours = corrupt(x, name, severity, constants=224)
    for before, after in zip(x, ours, strict=True):
        assert_levels_agree(array(after), peer.corrupt(array(before), severity, name), apart)


@SEVERITIES
def test_zoom_blur_is_the_peers_at_the_size_of_the_benchmark(severity):
    # At other sizes the peer cuts what is too much from the bottom and right, the benchmark from all sides.
    x = pictures(1, 224, 224)
    assert_levels_agree(array(corrupt(x, "zoom_blur", severity)[0]), peer.corrupt(array(x[0]), severity, "zoom_blur"))


@pytest.mark.parametrize("size", [(32, 32), (64, 64), (33, 50)])
@pytest.mark.parametrize("zoom", [1.0, 1.02, 1.25, 1.75, 2.25, 4.5])
def test_an_enlargement_is_scipys_cut_on_all_sides(zoom, size):
    plane = np.random.default_rng(0).normal(size=size)
    crops = [-(-length // zoom) for length in size]
    starts = [int((length - crop) // 2) for length, crop in zip(size, crops, strict=True)]
    inner = plane[starts[0] : starts[0] + int(crops[0]), starts[1] : starts[1] + int(crops[1])]
    larger = ndimage.zoom(inner, zoom, order=1)
    top, left = ((have - want) // 2 for have, want in zip(larger.shape, size, strict=True))
    rows, columns = filtering.zoom_crop(size, zoom)
    ours = filtering.zoom_and_crop(torch.from_numpy(plane)[None, None, rows, columns], zoom, size)
    np.testing.assert_allclose(ours[0, 0], larger[top : top + size[0], left : left + size[1]], atol=1e-12)


@pytest.mark.parametrize(("radius", "sigma"), [(3, 0.1), (8, 0.5), (10, 0.5), (0.3, 0.4), (1.5, 0.1), (2.5, 0.01)])
def test_the_kernel_of_defocus_is_opencvs_and_not_normalized(radius, sigma):
    theirs, ours = parts.disk(radius, sigma), filtering.disk(radius, sigma)
    margin = (len(theirs) - len(ours)) // 2
    np.testing.assert_allclose(np.pad(ours, margin), theirs, atol=1e-8)
    if radius in (8, 10):
        assert abs(ours.sum() - 1) > 1e-4


@pytest.mark.parametrize(("height", "width", "reach"), [(12, 12, 1), (17, 30, 2), (20, 15, 4)])
def test_glass_copies_pixel_after_pixel_from_the_bottom_right(height, width, reach):
    offsets = blur.glass_offsets(SampleRNG.of_samples(3, range(4)), reach, height, width)
    assert offsets.min() == -reach
    assert offsets.max() == reach - 1
    found = blur.shuffle_positions(offsets, reach, height, width)
    for sample in range(4):
        image = np.arange(height * width).reshape(height, width)
        for h in range(height - reach, reach, -1):
            for w in range(width - reach, reach, -1):
                down, right = offsets[sample, :, h - reach - 1, w - reach - 1].tolist()
                image[h, w] = image[h + down, w + right]
        np.testing.assert_array_equal(found[sample].view(height, width), image)


def test_glass_is_blur_shuffle_blur():
    x, rng = pictures(1, 40, 36), SampleRNG.of_samples(0, [5])
    ours = corrupt(x, "glass_blur", 3, rng, constants=224)
    soft = np.uint8(filters.gaussian(array(x[0]) / 255, sigma=1, channel_axis=-1) * 255)
    for turn in range(3):
        offsets = blur.glass_offsets(rng.stream("glass_blur", 3).stream("round", turn), 2, 40, 36)
        places = blur.shuffle_positions(offsets, 2, 40, 36)[0].numpy()
        soft = soft.reshape(-1, 3)[places].reshape(soft.shape)
    # A level that the first blur rounds the other way is carried on by the shuffle and shared out by the second.
    assert_levels_agree(array(ours[0]), np.uint8(filters.gaussian(soft / 255, sigma=1, channel_axis=-1) * 255), 0.02)


@pytest.mark.parametrize("angle", [-44.3, -7.0, 0.0, 12.5, 45.0, -90.0, -133.1])
@pytest.mark.parametrize(("radius", "sigma"), [(10, 3), (20, 15), (6, 1)])
def test_motion_blur_along_an_angle_is_the_peers(angle, radius, sigma):
    x = pictures(1, 50, 64)[0]
    taps = filtering.motion_taps(radius, sigma, angle, 50, 64)
    ours = filtering.blur_by_taps(x.mul(255).round().to(torch.uint8), taps)
    theirs = np.uint8(parts._motion_blur(array(x), radius, sigma, angle))
    # Along an axis much of the edge is flat. Flat stays flat here; theirs may lose a level to rounding.
    assert_levels_agree(ours.permute(1, 2, 0).numpy(), theirs, 0.05 if angle % 90 == 0 else 1e-3)


def test_a_ray_longer_than_the_image_ends_as_the_peers_does():
    x = pictures(1, 32, 32)[0]
    ours = filtering.blur_by_taps(x.mul(255).round().to(torch.uint8), filtering.motion_taps(20, 15, 10.0, 32, 32))
    assert_levels_agree(ours.permute(1, 2, 0).numpy(), np.uint8(parts._motion_blur(array(x), 20, 15, 10.0)))


@pytest.mark.parametrize("mix", [0.95, 0.55])
def test_fallen_snow_lies_as_in_the_formula(mix):
    x = pictures(1, 40, 48)
    layer = np.random.default_rng(0).integers(0, 120, (40, 48)).astype(np.uint8)
    image = np.float32(array(x[0])) / 255
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    white = (layer / 255)[..., None]
    expected = mix * image + (1 - mix) * np.maximum(image, gray * 1.5 + 0.5) + white + np.rot90(white, 2)
    ours = weather.add_snow(x.mul(255).round().to(torch.uint8), torch.from_numpy(layer)[None, None], mix)
    assert_levels_agree(ours[0].permute(1, 2, 0).numpy(), np.uint8(np.clip(expected, 0, 1) * 255))


@pytest.mark.parametrize(("size", "decay"), [(32, 3.0), (64, 1.75), (256, 1.4)])
def test_plasma_is_the_peers_from_the_same_chances(size, decay, monkeypatch):
    chances = np.random.default_rng(1).uniform(-1, 1, size * size - 1)
    left = [chances]

    def uniform(low: float, high: float, shape: tuple[int, int]) -> np.ndarray:
        taken, left[0] = np.split(left[0], [np.prod(shape)])
        return taken.reshape(shape) * high

    monkeypatch.setattr(parts.np.random, "uniform", uniform)
    theirs = parts.plasma_fractal(size, decay)
    np.testing.assert_allclose(weather.plasma(torch.from_numpy(chances)[None], size, decay)[0], theirs, atol=1e-5)
    assert len(left[0]) == 0


@pytest.mark.parametrize("scale", [0.2, 0.3, 1.0])
def test_frost_photos_are_opencvs(scale):
    folder = next(iter(peer.__path__))
    for name in PHOTOS:
        photo = cv2.resize(cv2.imread(f"{folder}/frost/{name}"), (0, 0), fx=scale, fy=scale)[..., ::-1]
        assert_levels_agree(
            frost_photo(name, scale, 8, 8).permute(1, 2, 0).numpy(), photo, 0.15 if scale == 0.3 else 0
        )  # OpenCV weighs in steps of 1/2048


def test_frost_is_a_piece_of_a_photo_added():
    x = pictures(6, 32, 32)
    ours = corrupt(x, "frost", 5, SampleRNG.of_samples(0, range(6)))
    for before, after in zip(x, ours, strict=True):
        ice = ((array(after).astype(float) - 0.75 * array(before)) / 0.45)[8:24:4, 8:24:4]
        bright = array(after)[8:24:4, 8:24:4] == 255
        errors = []
        for name in PHOTOS:
            photo = frost_photo(name, 0.2, 32, 32).permute(1, 2, 0).numpy()
            pieces = np.lib.stride_tricks.sliding_window_view(photo, (32, 32), (0, 1))[:-1, :-1]
            pieces = np.moveaxis(pieces[..., 8:24:4, 8:24:4], 2, -1)
            errors.append(np.where(bright, 0, np.abs(pieces - ice)).max((2, 3, 4)).min())
        assert min(errors) <= 1 / 0.45 + 1e-9  # what the cut to 8 bits takes away


@pytest.mark.parametrize(("height", "width"), [(32, 32), (61, 61), (40, 56)])
def test_three_points_move_the_image_as_in_opencv(height, width):
    x = pictures(1, height, width)
    moves = np.random.default_rng(0).uniform(-3, 3, (3, 2))
    arm, middle = min(height, width) // 3, np.array([width // 2, height // 2])
    before = np.float32([middle + arm, middle + np.array([arm, -arm]), middle - arm])
    image = np.float32(array(x[0]))
    matrix = cv2.getAffineTransform(before, np.float32(before + moves))
    expected = cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT_101)
    ours = digital.move_points(x * 255, torch.from_numpy(moves)[None])[0].permute(1, 2, 0)
    # OpenCV may look positions up in steps of 1/32 pixel.
    assert np.abs(ours.numpy() - expected).mean() < 1.0


@pytest.mark.parametrize(("alpha", "sigma"), [(1.6, 6.4), (3.2, 0.96), (488.0, 170.8)])
def test_displacements_are_scipys(alpha, sigma):
    x = pictures(1, 48, 40)
    noise = np.random.default_rng(0).uniform(-1, 1, (2, 48, 40))
    dx, dy = (filters.gaussian(field, sigma, mode="reflect", truncate=3) * alpha for field in noise)
    rows, columns = np.meshgrid(np.arange(48), np.arange(40), indexing="ij")
    expected = [
        ndimage.map_coordinates(plane, (rows + dy, columns + dx), order=1, mode="reflect") for plane in x[0].numpy()
    ]
    ours = digital.displace(x, torch.from_numpy(noise).float()[None], alpha, sigma)
    np.testing.assert_allclose(ours[0], expected, atol=1e-3)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (224, 224), (96, 71), (2, 9), (300, 520)])
@pytest.mark.parametrize("factor", [0.95, 0.85, 0.65, 0.6, 0.5, 0.4, 0.3, 0.25, 0.07, 0.003])
def test_pixelation_is_pillows(height, width, factor):
    pixels = torch.randint(0, 256, (2, 3, height, width), generator=torch.Generator().manual_seed(0)).byte()
    ours = digital.pixelate(pixels, SampleRNG.of_samples(0, range(2)), factor)
    small = max(1, int(width * factor)), max(1, int(height * factor))
    for before, after in zip(pixels, ours, strict=True):
        picture = Image.fromarray(before.permute(1, 2, 0).numpy()).resize(small, Image.Resampling.BOX)
        expected = np.asarray(picture.resize((width, height), Image.Resampling.NEAREST))
        np.testing.assert_array_equal(after.permute(1, 2, 0), expected)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (224, 224), (65, 97), (1, 1)])
@pytest.mark.parametrize("quality", [7, 25, 58, 80])
def test_both_codecs_give_the_same_pixels(height, width, quality):
    picture = array(pictures(1, height, width)[0])
    expected = digital._through_pillow(picture, quality)
    np.testing.assert_array_equal(digital._through_torchvision(picture, quality), expected)


def test_images_along_their_own_angles_are_blurred_one_by_one():
    pixels = pictures(6, 40, 36).mul(255).round().to(torch.uint8)
    angles = torch.tensor([30.0, -44.0, 30.0, 0.0, 29.9, -100.0], dtype=torch.float64)
    for nearest in (False, True):
        together = filtering.blur_along(pixels, angles, 20, 8, nearest)
        for image, angle, blurred in zip(pixels, angles.tolist(), together, strict=True):
            taps = filtering.motion_taps(20, 8, angle, 40, 36)
            padded = np.pad(image.numpy().astype(np.int64), ((0, 0), (64, 64), (64, 64)), mode="edge")
            total = sum(w * padded[:, 64 + dy : 104 + dy, 64 + dx : 100 + dx] for dy, dx, w in taps)
            np.testing.assert_array_equal(blurred, (total + nearest * 2**21) >> 22)


def drops(height: int, width: int, sigma: float, seed: int) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(0.65, 0.3, (1, 1, height, width))
    return spatter.liquid(torch.from_numpy(noise).float(), sigma, 0.68)


def test_liquid_is_smoothed_noise_above_a_threshold():
    noise = np.random.default_rng(0).normal(0.65, 0.3, (30, 40))
    expected = filters.gaussian(noise, sigma=2)
    expected[expected < 0.68] = 0
    np.testing.assert_allclose(
        spatter.liquid(torch.from_numpy(noise).float()[None, None], 2, 0.68)[0, 0], expected, atol=1e-5
    )


@pytest.mark.parametrize(("height", "width", "sigma"), [(32, 32, 1), (224, 224, 4), (70, 45, 2)])
def test_edges_distances_and_histogram_are_opencvs(height, width, sigma):
    wet = (drops(height, width, sigma, 0) * 255).to(torch.uint8)[:, 0]
    edges = spatter.edges(wet.to(torch.int32), 50, 150)
    theirs = cv2.Canny(wet[0].numpy(), 50, 150)
    np.testing.assert_array_equal(edges[0], theirs > 0)
    distance = cv2.distanceTransform(255 - theirs, cv2.DIST_L2, 5)
    ours = spatter.chamfer(edges)[0] / 65536
    np.testing.assert_allclose(ours, np.minimum(distance, 20), atol=1e-4)
    levels = np.uint8(np.minimum(distance, 20))
    ours = spatter.equalize(torch.from_numpy(levels)[None].to(torch.int32))
    np.testing.assert_array_equal(ours[0], cv2.equalizeHist(levels))


def test_short_costs_order_paths_as_exact_ones_do():
    def cost(path: tuple[int, int, int], costs: dict[int, int]) -> int:
        return sum(count * costs[square] for count, square in zip(path, (1, 2, 5), strict=True))

    paths = [(i, 0, k) for i in range(25) for k in range(12)] + [(0, j, k) for j in range(1, 18) for k in range(12)]
    paths.sort(key=lambda path: cost(path, spatter._EXACT))
    near = [path for path in paths if cost(path, spatter._EXACT) < 20 * spatter._EXACT[1]]
    short = [cost(path, spatter._SHORT) for path in near]
    assert len(near) == 174
    assert all(one < other for one, other in pairwise(short))
    assert all(cost(path, spatter._SHORT) >= 20 * spatter._SHORT[1] for path in paths[len(near) :])
    assert 2 * 20 * spatter._SHORT[1] < 2**16
    assert spatter._exact_distances()[short].tolist() == [cost(path, spatter._EXACT) for path in near]


@pytest.mark.parametrize("seed", range(3))
def test_water_is_what_opencv_makes_of_the_same_drops(seed):
    x, layer = pictures(1, 64, 80, seed), drops(64, 80, 2, seed)
    wet = (layer[0, 0] * 255).to(torch.uint8).numpy()
    relief = cv2.distanceTransform(255 - cv2.Canny(wet, 50, 150), cv2.DIST_L2, 5)
    relief = cv2.blur(np.minimum(relief, 20), (3, 3)).astype(np.uint8)
    lit = cv2.filter2D(cv2.equalizeHist(relief), cv2.CV_8U, np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]))
    shine = np.float32(wet) * cv2.blur(lit, (3, 3))
    cover = (shine / shine.max() * 0.6)[..., None]
    expected = np.clip(array(x[0]) / 255 + cover * np.array([175, 238, 238]) / 255, 0, 1) * 255
    ours = spatter.add_water(x.mul(255).round().to(torch.uint8), layer, 0.6)
    assert_levels_agree(ours[0].permute(1, 2, 0).numpy(), np.uint8(expected))


Statistic = Callable[[np.ndarray], float]


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "fog", "motion_blur"]
)
@pytest.mark.parametrize("severity", [1, 5])
def test_what_is_random_has_the_peers_mean_and_spread(name, severity):
    x = pictures(48, 32, 32)
    ours = corrupt(x, name, severity, SampleRNG.of_samples(1, range(48)), constants=224)
    np.random.seed(0)
    theirs = torch.stack(
        [torch.from_numpy(peer.corrupt(array(image), severity, name)).permute(2, 0, 1) / 255 for image in x]
    )
    for statistic in (lambda y: (y - x).mean((1, 2, 3)), lambda y: (y - x).square().mean((1, 2, 3)).sqrt()):
        one, other = statistic(ours), statistic(theirs)
        error = ((one.var() + other.var()) / 48).sqrt()
        assert abs(one.mean() - other.mean()) < 4 * error + 1e-3
