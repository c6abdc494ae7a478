"""simplejpeg and Pillow give the same pixels, or the same failure, for every file."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import pytest
from pictures import picture, pixels_of, png
from PIL import Image, features

from vitadel.data import jpeg
from vitadel.data.images import decode, read_each

simplejpeg = pytest.importorskip("simplejpeg")
SIZES = [(1, 1), (1, 2), (2, 1), (3, 5), (7, 8), (8, 8), (9, 17), (16, 16), (17, 31), (33, 48), (64, 65)]
END = b"\xff\xd9"


def waves(height: int, width: int) -> np.ndarray:
    down, across = np.mgrid[0:height, 0:width]
    return np.stack([127 + 100 * np.sin(across / (3 + part) + down / 9) for part in range(3)], 2).astype(np.uint8)


def encoded(pixels: np.ndarray, mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def by_pillow(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"))


def outcome(content: bytes) -> tuple[object, ...]:
    """Size and pixels, or the kind of the failure and its message."""
    try:
        image = decode(content)
    except Exception as fault:
        return type(fault), str(fault)
    return image.mode, image.size, image.tobytes()


def assert_same_outcome(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    here = outcome(content)
    with monkeypatch.context() as changed:
        changed.setattr(jpeg, "simplejpeg", None)
        assert outcome(content) == here, content.hex()


def ordinary() -> Iterator[bytes]:
    for number, (height, width) in enumerate(SIZES):
        for pixels in (picture(number, height, width), waves(height, width)):
            for quality in (1, 75, 100):
                for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
                    yield encoded(pixels, quality=quality, subsampling=subsampling)
                    yield encoded(pixels, quality=quality, subsampling=subsampling, progressive=True)
                yield simplejpeg.encode_jpeg(pixels, quality=quality, colorsubsampling="440")
                yield encoded(pixels, "L", quality=quality)
            yield encoded(pixels, "L", progressive=True)
            yield encoded(pixels, restart_marker_blocks=2)
            yield encoded(pixels, optimize=True, comment=b"a comment")


def test_ordinary_files_have_pillows_pixels() -> None:
    count = 0
    for content in ordinary():
        image = jpeg.decode_jpeg(content)
        assert image is not None
        assert np.array_equal(pixels_of(image), by_pillow(content))
        count += 1
    assert count == 2 * len(SIZES) * (3 * 8 + 3)


def extraordinary() -> dict[str, bytes]:
    pixels, exif = picture(1, 20, 30), Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees to view"
    plain, several = encoded(pixels), io.BytesIO()
    Image.fromarray(pixels).save(several, "MPO", save_all=True, append_images=[Image.fromarray(pixels[::-1])])
    return {
        "CMYK": encoded(pixels, "CMYK"),
        "RGB that is not converted": encoded(pixels, keep_rgb=True),
        "EXIF": encoded(pixels, exif=exif),
        "ICC": encoded(pixels, icc_profile=bytes(70_000)),
        "Adobe": plain[:2] + b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0\0" + plain[2:],  # components are RGB
        "4:1:1": simplejpeg.encode_jpeg(pixels, colorsubsampling="411"),
        "two images": several.getvalue(),
        "more after the end": plain + b"more",
        "no end": plain[:-2],
        "bytes before a marker": plain[:2] + b"\xff" + plain[2:],
        "arithmetic coding": plain.replace(b"\xff\xc0\0\x11", b"\xff\xc9\0\x11"),
        "12 bits": plain.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
        "no height": plain.replace(b"\xff\xc0\0\x11\x08\0\x14", b"\xff\xc0\0\x11\x08\0\0"),
        "only a beginning": plain[:2] + END,
        "PNG": png(pixels),
        "no image": b"not a picture",
    }


@pytest.mark.parametrize("kind", extraordinary())
def test_pillow_decodes_or_refuses_everything_else(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = extraordinary()[kind]
    assert jpeg.decode_jpeg(content) is None
    assert_same_outcome(content, monkeypatch)


def test_exif_does_not_turn_a_jpeg_file() -> None:
    assert decode(extraordinary()["EXIF"]).size == (30, 20)


def test_a_truncated_file_is_reported_as_pillow_does() -> None:
    content = encoded(picture(2, 60, 60))
    (fault,) = read_each(decode, [content[: len(content) // 2]])
    assert isinstance(fault, OSError)
    assert "image file is truncated" in str(fault)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_truncated_files(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(waves(24, 33), **options)
    for end in range(0, len(content), 7):
        assert_same_outcome(content[:end], monkeypatch)
        assert_same_outcome(content[:end] + END, monkeypatch)


def test_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.random.default_rng(0)
    whole = [
        encoded(picture(3, 17, 31), subsampling="4:2:0"),
        encoded(waves(40, 24), progressive=True),
        encoded(waves(16, 16), "L"),
        encoded(waves(20, 50), restart_marker_blocks=1, subsampling="4:2:2"),
    ]
    decoded = 0
    for turn in range(1200):
        content = bytearray(whole[turn % 4])
        place = int(source.integers(len(content) if turn % 3 else 200))  # 200: inside the header
        match turn // 4 % 4:
            case 0:
                content[place] ^= 1 << int(source.integers(8))
            case 1:
                content[place] = int(source.integers(256))
            case 2:
                del content[place : place + int(source.integers(1, 20))]
            case _:
                content[place:place] = source.bytes(int(source.integers(1, 8)))
        decoded += jpeg.decode_jpeg(bytes(content)) is not None
        assert_same_outcome(bytes(content), monkeypatch)
    assert 100 < decoded < 1100  # both ways were taken


def test_the_limit_of_pillow_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(picture(4, 20, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    assert jpeg.decode_jpeg(content) is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    with pytest.raises(Image.DecompressionBombError):
        decode(content)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert jpeg.decode_jpeg(content) is not None


@pytest.mark.parametrize(("version", "same"), [(None, False), ("2.1.5", False), ("3.0.4", True), ("3.1.4.1", True)])
def test_another_library_in_pillow_is_noticed(version: str | None, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "version", lambda _: version)
    assert jpeg.pillow_has_turbo() is same


def test_without_simplejpeg_pillow_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded(picture(5))
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert jpeg.decode_jpeg(content) is None
    assert np.array_equal(pixels_of(decode(content)), by_pillow(content))
