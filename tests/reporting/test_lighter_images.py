"""What is seen pixel by pixel stays as it is; photographs become smaller and look the same."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from vitadel.reporting.figures import lighten_images


def address(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def seen(address: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))), float)


def grainy(side: int, channels: int = 3) -> np.ndarray:
    ramp = np.linspace(40, 200, side)[:, None, None] + np.zeros((side, side, channels))
    grain = np.random.default_rng(0).normal(0, 6, (side, side, 1))
    return (ramp + grain).clip(0, 255).astype(np.uint8)


def test_photographs_shrink_and_stay_what_they_are() -> None:
    opaque = np.dstack([grainy(224), np.full((224, 224), 255, np.uint8)])
    before = address(opaque)
    after = lighten_images(before)
    assert after.startswith("data:image/jpeg")
    assert len(after) < 0.6 * len(before)
    blocks = (seen(after) - opaque[..., :3]).reshape(28, 8, 28, 8, 3).mean((1, 3))
    assert np.abs(blocks).max() < 3  # of 255: only grain is lost


def test_small_and_transparent_images_and_other_addresses_are_left_alone() -> None:
    half = np.dstack([grainy(224), np.full((224, 224), 128, np.uint8)])
    for kept in (address(grainy(64)), address(half), "<svg><use href='#clip'/></svg>"):
        assert lighten_images(kept) == kept


def test_what_stands_around_an_image_stays() -> None:
    before = f'<g><image href="{address(grainy(224))}"/><text>a/b+c=d</text><image href="{address(grainy(32))}"/></g>'
    after = lighten_images(before)
    assert after.startswith('<g><image href="data:image/jpeg;base64,')
    assert after.endswith(before[before.index('"/><text>') :])


def test_what_jpeg_would_not_make_shorter_stays_a_png() -> None:
    checks = np.kron(np.indices((200, 200)).sum(0) % 2 * 255, np.ones((4, 4))).astype(np.uint8)
    noisy = np.dstack([np.random.default_rng(0).choice([0, 255], (700, 700)).astype(np.uint8)] * 3)
    assert lighten_images(address(np.dstack([checks] * 3))) == address(np.dstack([checks] * 3))
    assert lighten_images(address(noisy)).startswith("data:image/png")
