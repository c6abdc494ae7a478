from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image
from timm.data import create_transform

from vitadel.data import Preprocess
from vitadel.data.images import decode
from vitadel.errors import UserError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("size", "crop_pct"), [(32, 1.0), (32, 0.875), ((24, 40), 0.9), (48, 0.95)])
@pytest.mark.parametrize("shape", [(50, 80), (33, 32), (20, 20)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_timms_evaluation_transform_up_to_normalization(crop_mode, size, crop_pct, shape, interpolation) -> None:
    image = Image.fromarray(picture(0, *shape))
    height, width = (size, size) if isinstance(size, int) else size
    transform = create_transform(
        (3, height, width),
        is_training=False,
        interpolation=interpolation,
        mean=MEAN,
        std=STD,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
    pixels = Preprocess(size, crop_pct, interpolation, crop_mode, MEAN)(image)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, height, width)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    assert torch.allclose((pixels / 255 - mean) / std, transform(image), atol=1e-6)


def test_large_files_are_decoded_whole_as_the_published_preprocessing_does() -> None:
    """libjpeg can decode to half the size and less (Pillow's draft mode), which gives other pixels."""
    buffer = io.BytesIO()
    Image.fromarray(picture(0, 150, 200)).save(buffer, "JPEG", quality=90)
    preprocess = Preprocess(32, 0.875)
    smaller = Image.open(io.BytesIO(buffer.getvalue()))
    smaller.draft("RGB", (36, 36))
    assert smaller.size == (50, 38)
    found = preprocess(decode(buffer.getvalue()))
    assert torch.equal(found, preprocess(Image.open(io.BytesIO(buffer.getvalue())).convert("RGB")))
    assert (found.int() - preprocess(smaller).int()).abs().max() > 1


def test_a_picture_of_the_right_size_is_untouched_whatever_the_crop() -> None:
    for mode in ("center", "squash", "border"):
        pixels = Preprocess(32, 0.875, crop_mode=mode)(Image.fromarray(picture(1, 32, 32)))
        assert np.array_equal(pixels.permute(1, 2, 0).numpy(), picture(1, 32, 32))
    wide = Preprocess((6, 9))(Image.fromarray(picture(1, 6, 9)))
    assert np.array_equal(wide.permute(1, 2, 0).numpy(), picture(1, 6, 9))


def test_the_centre_is_what_is_kept() -> None:
    """Without a change of scale, the crop is a slice."""
    image = Image.fromarray(picture(2, 32, 48))
    assert np.array_equal(Preprocess(32)(image).permute(1, 2, 0).numpy(), picture(2, 32, 48)[:, 8:40])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be positive"),
        ({"size": 32, "crop_pct": 0.0}, r"crop_pct must be in \(0, 1\], got 0"),
        ({"size": 32, "interpolation": "bicubc"}, "unknown interpolation 'bicubc'.*did you mean bicubic"),
        ({"size": 32, "crop_mode": "centre"}, "unknown crop_mode 'centre'.*did you mean center"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Preprocess(**settings)  # type: ignore[arg-type]


def test_its_description() -> None:
    assert Preprocess(224, 0.875).about == "shorter side to 256 pixels (bicubic), then the central 224 x 224"
    squashed = Preprocess(32, 1.0, "bilinear", "squash")
    assert squashed.about == "squashed to 32 x 32 pixels (bilinear), then the central 32 x 32"
    padded = Preprocess((24, 40), 0.8, crop_mode="border")
    assert padded.about == "longer side to 30 x 50 pixels, then padded (bicubic), then the central 24 x 40"
