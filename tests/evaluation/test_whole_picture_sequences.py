"""ImageNet-P on the fly: the whole resized picture moves, as torchvision and OpenCV move it, and is cropped after."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from vitadel.backbones.classifier import wrap
from vitadel.data import open_dataset
from vitadel.evaluation.corruptions.run import corruptions


class Recorder(nn.Module):
    """Keeps the frames that it is shown."""

    num_classes = 2

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return torch.zeros(len(x), 2)


def picture(width: int, height: int) -> Image.Image:
    """Smooth colors without any black, so that black pixels are those from outside."""
    y, x = np.mgrid[0:height, 0:width]
    channels = [90 + 60 * np.sin(x / 40 + k) + 50 * np.cos(y / 30 - k) for k in range(3)]
    return Image.fromarray(np.clip(np.stack(channels, -1) + 40, 30, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pictures")
    for name, size in (("a/wide", (500, 375)), ("b/tall", (300, 400))):
        (root / name).parent.mkdir()
        picture(*size).save(root / f"{name}.png")
    return root


@cache
def frames_of(folder, name: str) -> dict[str, np.ndarray]:
    """Frames (frames, height, width, 3) of either picture, as the model got them.

    The first pass is of clean images, and the last one counts multiply-adds.
    """
    model = Recorder()
    corruptions(
        wrap(model, input_size=224),
        open_dataset(f"folder:{folder}"),
        corruptions=(),
        perturbations=(name,),
        device="cpu",
    )
    frames = torch.cat(model.seen[1:-1]).mul(255).round().byte().permute(0, 2, 3, 1).numpy()
    length = {"translate": 41}.get(name, 31)
    assert len(frames) == 2 * length
    # Two pictures fit into a batch of 64, so frames of both come in turn.
    return {"wide": frames[0::2], "tall": frames[1::2]}


def whole(kind: str) -> Image.Image:
    return TF.resize(picture(500, 375) if kind == "wide" else picture(300, 400), 256)


def cropped(image: Image.Image) -> np.ndarray:
    return np.asarray(TF.center_crop(image, [224, 224]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "frames"), [("translate", (0, 33)), ("scale", (0, 10)), ("rotate", (2, 30))])
def test_motions_of_the_whole_picture_are_torchvisions(folder, name, frames):
    ours = frames_of(folder, name)
    for kind in ("wide", "tall"):
        for frame in frames:
            settings = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0]}
            settings |= {
                "translate": {"translate": [frame - 20, 0]},
                "rotate": {"angle": frame - 15},
                "scale": {"scale": (40 + 2.5 * frame) / 100},
            }[name]
            expected = cropped(TF.affine(whole(kind), interpolation=InterpolationMode.BILINEAR, **settings))
            gap = np.abs(ours[kind][frame].astype(int) - expected)
            assert np.quantile(gap, 0.99) <= 1, (kind, frame)
            assert (gap > 2).mean() < 0.005, (kind, frame)


@pytest.mark.slow
def test_black_is_what_the_benchmark_has(folder):
    """A picture of 4 : 3 at 65 % leaves 27 % black; cut to a square first, it would leave 45 %. A shift leaves none."""
    black = (frames_of(folder, "scale")["wide"][10] == 0).all(-1).mean()
    width, height = 341 * 0.65, 256 * 0.65
    assert black == pytest.approx(1 - min(width, 224) * min(height, 224) / 224**2, abs=0.01)
    assert black == pytest.approx(0.27, abs=0.01)
    moved = frames_of(folder, "translate")
    assert not (moved["wide"][0] == 0).all(-1).any()
    assert (moved["tall"][0] == 0).all(-1).mean() == pytest.approx(4 / 224, abs=1e-6)  # 20 pixels, of which 16 are cut


@pytest.mark.slow
@pytest.mark.parametrize("frame", [0, 24])
def test_tilting_is_seen_from_the_diagonal_of_the_whole_picture(folder, frame):
    cv2 = pytest.importorskip("cv2")
    ours = frames_of(folder, "tilt")
    for kind in ("wide", "tall"):
        image = np.asarray(whole(kind))
        height, width = image.shape[:2]
        angle, focal = math.radians(frame - 15), math.hypot(height, width)
        cos, sin = math.cos(angle), math.sin(angle)
        flat = np.array([[1, 0, -width / 2], [0, 1, -height / 2], [0, 0, 1], [0, 0, 1]])
        about_x = np.array([[1, 0, 0, 0], [0, cos, -sin, 0], [0, sin, cos, 0], [0, 0, 0, 1]])
        about_y = np.array([[cos, 0, -sin, 0], [0, 1, 0, 0], [sin, 0, cos, 0], [0, 0, 0, 1]])
        away = np.eye(4)
        away[2, 3] = focal
        lens = np.array([[focal, 0, width / 2, 0], [0, focal, height / 2, 0], [0, 0, 1, 0]])
        expected = cv2.warpPerspective(image, lens @ away @ about_x @ about_y @ flat, (width, height))
        gap = np.abs(ours[kind][frame].astype(int) - cropped(Image.fromarray(expected)))
        assert gap.mean() < 0.6, kind  # another focal length (that of a square) moves the picture by pixels
