from __future__ import annotations

import io

import numpy as np
import pytest
from pictures import picture, pixels_of, png
from PIL import Image
from timm.data import ImageDataset

from vitadel.data.images import decode, from_array, read_each
from vitadel.errors import UserError


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_lossless_picture_comes_back_bit_for_bit() -> None:
    assert np.array_equal(pixels_of(decode(png(picture(1)))), picture(1))


def test_gray_is_repeated_over_the_channels() -> None:
    gray = picture(2)[..., 0]
    assert np.array_equal(pixels_of(decode(encoded(Image.fromarray(gray), "PNG"))), np.stack([gray] * 3, axis=-1))


def test_alpha_is_dropped_and_not_blended() -> None:
    rgba = np.dstack([picture(3), picture(4)[..., 0]])
    assert np.array_equal(pixels_of(decode(encoded(Image.fromarray(rgba), "PNG"))), rgba[..., :3])


def test_palette_with_transparency_gives_the_palette_colors_without_a_warning() -> None:
    colors = picture(5, 1, 4)[0]
    places = np.arange(12, dtype=np.uint8).reshape(3, 4) % 4
    image = Image.fromarray(places).convert("P")
    image.putpalette(colors.tobytes())
    content = encoded(image, "PNG", transparency=bytes([0, 128, 255, 7]))
    assert np.array_equal(pixels_of(decode(content)), colors[places])


def test_cmyk_is_inverted_ink() -> None:
    ink = np.zeros((2, 3, 4), dtype=np.uint8)
    ink[..., 0], ink[..., 3] = 255, 0  # full cyan, no black
    content = encoded(Image.frombytes("CMYK", (3, 2), ink.tobytes()), "TIFF")
    assert np.array_equal(pixels_of(decode(content)), np.broadcast_to([0, 255, 255], (2, 3, 3)))


def test_sixteen_bits_are_narrowed_as_pillow_does_it() -> None:
    deep = (np.arange(20, dtype=np.uint16) * 3000).reshape(4, 5)
    content = encoded(Image.fromarray(deep), "PNG")
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(pixels_of(decode(content)), expected)


def test_exif_does_not_turn_the_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view"
    content = encoded(Image.fromarray(picture(6, 4, 9)), "PNG", exif=exif)
    assert np.array_equal(pixels_of(decode(content)), picture(6, 4, 9))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_the_same_pixels_as_timm_reads(mode: str) -> None:
    image = Image.fromarray(picture(7))
    image = Image.fromarray(picture(7)[..., 0].astype(np.uint16) * 100) if mode == "I;16" else image.convert(mode)
    content = encoded(image, "TIFF")
    read, _ = ImageDataset("", reader=[(io.BytesIO(content), 0)])[0]
    assert np.array_equal(pixels_of(decode(content)), np.asarray(read))


def test_broken_files_say_what_is_wrong() -> None:
    whole = png(picture(8, 64, 64))
    faults = read_each(decode, [b"", b"not a picture", whole[: len(whole) // 2], whole])
    assert [type(fault).__name__ for fault in faults[:3]] == ["ValueError", "ValueError", "OSError"]
    assert "empty" in str(faults[0])
    assert "13 bytes" in str(faults[1])
    assert "truncated" in str(faults[2])
    assert np.array_equal(pixels_of(faults[3]), picture(8, 64, 64))


def test_a_user_error_is_not_blamed_on_the_sample() -> None:
    def full(_: int) -> Image.Image:
        raise UserError("no room for temporary files")

    with pytest.raises(UserError, match="no room"):
        read_each(full, [1])


def test_arrays_of_every_layout_and_type() -> None:
    expected = picture(9)
    assert np.array_equal(pixels_of(from_array(expected)), expected)
    assert np.array_equal(pixels_of(from_array(expected.transpose(2, 0, 1))), expected)
    assert np.array_equal(pixels_of(from_array(expected[..., 0])), np.stack([expected[..., 0]] * 3, -1))
    assert np.array_equal(pixels_of(from_array(expected[..., :1])), np.stack([expected[..., 0]] * 3, -1))
    for kind in (np.float32, np.float64):
        assert np.array_equal(pixels_of(from_array(expected.astype(kind) / 255)), expected)


@pytest.mark.parametrize("bad", [-0.01, 1.01, 255.0, np.nan])
def test_floats_outside_the_unit_interval_are_refused(bad: float) -> None:
    values = np.full((4, 4, 3), 0.5)
    values[1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        from_array(values)
