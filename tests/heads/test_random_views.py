"""Random views of training images: in the image, determined by seed, image and step, masks moved like their images."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms import RandomResizedCrop

from small_probes import linear, masks
from vitadel.heads.probe import run_probe
from vitadel.heads.probe_recipe import build_probe
from vitadel.heads.random_views import RandomScaleCrop, crop_box, random_crop, recolored
from vitadel.heads.segmentation import slide
from vitadel.runtime.distributed import join_processes
from vitadel.runtime.rng import SampleRNG

CPU = join_processes("cpu")


def ramp(width=60, height=40):
    """Red grows to the right, green downwards: a crop shows where it was cut."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    return Image.fromarray(np.stack([4 * across, 6 * down, 0 * down], axis=-1).astype(np.uint8))


def test_boxes_are_distributed_as_torchvision_s():
    """An independent implementation: the means of place, area and shape agree within four standard errors."""
    n, image = 3000, torch.empty(3, 40, 60)
    draws = SampleRNG.of_samples(0, range(n)).stream("views").uniform(40)
    ours = torch.tensor([crop_box(60, 40, each) for each in draws], dtype=torch.float64)
    torch.manual_seed(0)
    boxes = [RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(n)]
    theirs = torch.tensor([(left, top, width, height) for top, left, height, width in boxes], dtype=torch.float64)
    for here, there in (
        *zip(ours.unbind(1), theirs.unbind(1), strict=True),
        *[[each[:, 2] * each[:, 3] for each in (ours, theirs)], [each[:, 2] / each[:, 3] for each in (ours, theirs)]],
    ):
        error = float((here.var() / n + there.var() / n).sqrt())
        assert abs(float(here.mean() - there.mean())) < 4 * error
    assert bool((ours[:, 0] + ours[:, 2] <= 60).all() and (ours[:, 1] + ours[:, 3] <= 40).all())


def test_an_image_that_no_draw_fits_is_cropped_at_its_center():
    assert crop_box(120, 10, torch.full((40,), 0.999)) == (53, 0, 13, 10)
    assert crop_box(10, 120, torch.full((40,), 0.999)) == (0, 53, 10, 13)


def test_crops_are_resized_and_flipped():
    draws = torch.zeros(41)  # the smallest area at the top left, three quarters as wide as tall
    wide, tall = 12, 16
    assert crop_box(60, 40, draws[:-1]) == (0, 0, wide, tall)
    flipped, plain = (
        random_crop(ramp(), (16, 12), "bilinear", torch.cat([draws[:-1], torch.tensor([coin])])) for coin in (0.1, 0.9)
    )
    assert plain[0, 0].tolist() == [4 * k for k in range(12)]
    assert plain[1, :, 0].tolist() == [6 * k for k in range(16)]
    assert torch.equal(flipped, plain.flip(2))


def test_mask_and_image_are_moved_alike():
    """A mask that repeats what the image shows still does so after any view; where nothing is, nothing counts."""
    image = Image.fromarray(np.kron(np.array([[0, 255], [255, 0]], dtype=np.uint8), np.ones((32, 32))).astype(np.uint8))
    pixels, values = image.convert("RGB"), (np.array(image) > 127).astype(np.int64)
    seen = set()
    for step in range(40):
        view, mask = RandomScaleCrop((32, 32), "bilinear", 0, step).pair(pixels, values, 5)
        assert view.shape == (3, 32, 32)
        assert mask.shape == (32, 32)
        gray = view.float().mean(0)
        flat = F.max_pool2d(mask[None].float(), 3, 1, 1) == -F.max_pool2d(-mask[None].float(), 3, 1, 1)
        bright, dark = (gray[flat[0] & (mask == number)] for number in (1, 0))
        assert len(bright) == 0 or len(dark) == 0 or bright.min() > dark.max()
        assert set(mask.unique().tolist()) <= {0, 1, 255}
        seen.add((int((mask == 255).sum()) > 0, int(mask.sum())))
    assert len(seen) > 20  # views differ
    assert {black for black, _ in seen} == {True, False}  # small and large scales


def test_views_are_determined_by_seed_image_and_step():
    values = np.zeros((40, 60), dtype=np.int64)
    values[:, 30:] = 1
    cut = RandomScaleCrop((32, 32), "bilinear", 1, 4)
    (first, mask), (again, _) = (cut.pair(ramp(), values, 5) for _ in range(2))
    assert torch.equal(first, again)
    for other in (RandomScaleCrop((32, 32), "bilinear", 2, 4), RandomScaleCrop((32, 32), "bilinear", 1, 5)):
        assert not torch.equal(first, other.pair(ramp(), values, 5)[0])
    assert not torch.equal(first, cut.pair(ramp(), values, 6)[0])
    assert int(mask[mask != 255].bincount().max()) < 0.75 * int((mask != 255).sum())  # not one class alone


def test_colors_change_by_known_amounts():
    pixels = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    off = [0.9] * 4
    assert torch.equal(recolored(pixels, [0.3] * 4 + off), pixels)
    assert recolored(pixels, [0.75, 0, 0, 0, 0.1, *off[1:]])[0, 0, 0] == 116  # half of 32 more
    assert recolored(pixels, [0, 0.25, 0, 0, 0.9, 0.1, 0.9, 0.9])[0, 0, 0] == 75  # times 0.75
    assert torch.equal(recolored(pixels, [0, 0, 0.9, 0.9, 0.9, 0.9, 0.1, 0.1]), pixels)  # gray has neither
    red = torch.zeros(3, 2, 2, dtype=torch.uint8)
    red[0] = 255
    assert recolored(red, [0, 0, 0, 1, 0.9, 0.9, 0.9, 0.1])[:, 0, 0].tolist() == [255, 153, 0]  # a tenth of the circle
    assert recolored(red, [0, 0, 0, 0, 0.9, 0.9, 0.1, 0.9])[:, 0, 0].tolist() == [166, 38, 38]  # half of the saturation


class Shown(torch.nn.Module):
    """A segmenter that answers with what it sees, plus the number of the window."""

    def __init__(self):
        super().__init__()
        self.windows = []

    def forward(self, x):
        self.windows.append(tuple(x.shape[-2:]))
        return x + len(self.windows) - 1


@pytest.mark.parametrize(
    ("side", "stride", "starts"), [(8, 3, [0]), (9, 3, [0, 1]), (14, 3, [0, 3, 6]), (15, 3, [0, 3, 6, 7])]
)
def test_windows_slide_over_an_image_and_are_averaged(side, stride, starts):
    model, x = Shown(), torch.arange(side * 8.0).view(1, 1, 8, side)
    found = slide(model, x, (8, 8), stride, (8, side))
    assert model.windows == [(8, 8)] * len(starts)
    for column in range(side):
        covering = [number for number, start in enumerate(starts) if start <= column < start + 8]
        expected = x[0, 0, :, column] + sum(covering) / len(covering)
        torch.testing.assert_close(found[0, 0, :, column], expected)
    assert slide(Shown(), x, (8, 8), stride, (16, 2 * side)).shape == (1, 1, 16, 2 * side)


@pytest.mark.slow
def test_heads_are_trained_on_views(tmp_path):
    """As good as chance or better, not those of the center crops, and the same again."""
    heads = {}
    for name, more in (("plain", {}), ("views", {"augment": True}), ("again", {"augment": True})):
        recipe = build_probe(linear(data=more, audit={"attacks": []}), "toy")
        results = run_probe(recipe, "toy", CPU, out=tmp_path / name).results
        heads[name] = (tmp_path / name / "weights" / "head.safetensors").read_bytes()
        assert results["clean"]["accuracy"] >= 0.1
    assert heads["views"] == heads["again"] != heads["plain"]


@pytest.mark.slow
def test_masks_are_judged_whole_and_drawn(tmp_path):
    """Windows of the whole image's size are the image itself: the score is that of the plain run."""
    scores = {}
    for name, more in (("plain", {}), ("whole", {"stride": 7}), ("views", {"augment": True})):
        recipe = build_probe(masks(data=more, audit={"attacks": ["pgd-3(paper=true)"]}), "toy")
        found = run_probe(recipe, "toy", CPU, out=tmp_path / name).results["segmentation"]
        scores[name] = found["clean"]["mean_iou"]
        assert found["attacks"][0]["settings"]["paper"] is True
        with np.load(tmp_path / name / "segmented.npz") as pictures:
            assert pictures["images"].shape == (4, 16, 16, 3)
            assert pictures["truth"].shape == pictures["clean"].shape == pictures["attacked"].shape == (4, 16, 16)
            levels = pictures["attacked images"].astype(int) - pictures["images"]
            assert -2 <= levels.min() < 0 < levels.max() <= 1
    assert scores["whole"] == pytest.approx(scores["plain"])
    assert scores["views"] != scores["plain"]
    assert math.isfinite(scores["views"])
