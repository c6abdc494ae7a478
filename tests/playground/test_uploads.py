"""Files that people send: read, refused with one clear message, and gone afterwards."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from vitadel.errors import UserError
from vitadel.playground.uploads import MOST_BYTES, read_upload, take_upload


def encoded(kind: str, size: tuple[int, int] = (6, 4), **settings: object) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(buffer, format=kind, **settings)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims any number of pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(("kind", "settings"), [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95})])
def test_three_types_are_read(kind: str, settings: dict[str, object]) -> None:
    picture = read_upload(encoded(kind, **settings))
    assert (picture.mode, picture.size) == ("RGB", (6, 4))
    color = picture.getpixel((2, 2))
    assert isinstance(color, tuple)
    assert all(abs(got - meant) <= 3 for got, meant in zip(color, (200, 30, 90), strict=True))


def test_a_photograph_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    assert read_upload(encoded("JPEG", exif=exif)).size == (4, 6)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image that can be read"),
        (b"GIF89a" + bytes(40), "not an image that can be read"),
        (encoded("BMP"), "not an image that can be read"),
        (encoded("TIFF"), "not an image that can be read"),
        (encoded("JPEG", (64, 64))[:400], "not an image that can be read"),
        (bytes(MOST_BYTES + 1), "too large"),
        (bomb(5001, 5000), "5001 x 5000 pixels, too many"),
        (bomb(10_000, 10_000), "too many"),
        (bomb(100_000, 100_000), "far too many pixels"),
        (bomb(1, 25_000_000), "1 x 25000000 pixels, too long"),
        (bomb(10_001, 2_000), "10001 x 2000 pixels, too long"),
        (encoded("PNG", (3, 61)), "3 x 61 pixels, too long"),
    ],
    ids=[
        "empty",
        "svg",
        "gif",
        "bmp",
        "tiff",
        "cut off",
        "bytes",
        "pixels",
        "bomb",
        "huge bomb",
        "thread",
        "long",
        "narrow",
    ],
)
def test_what_is_refused_and_how(content: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        read_upload(content)
    assert "PNG, JPEG or WebP of at most 10 MB and 25 million pixels" in str(refusal.value)
    assert "no side over 10,000 pixels or 20 times the other" in str(refusal.value)


@pytest.mark.parametrize("size", [(10_000, 500), (3, 60)])
def test_what_is_just_not_too_long(size: tuple[int, int]) -> None:
    assert read_upload(encoded("PNG", size)).size == size


@pytest.mark.parametrize("content", [encoded("PNG"), b"no picture"])
def test_the_file_is_gone_whether_it_could_be_read_or_not(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "sent" / "a.png"
    path.parent.mkdir()
    path.write_bytes(content)
    if content == b"no picture":
        with pytest.raises(UserError):
            take_upload(path, tmp_path / "sent")
    else:
        assert take_upload(path, tmp_path / "sent").size == (6, 4)
    assert not path.exists()


def test_files_elsewhere_are_neither_read_nor_removed(tmp_path: Path) -> None:
    path = tmp_path / "mine.png"
    path.write_bytes(encoded("PNG"))
    for sneaky in (path, tmp_path / "sent" / ".." / "mine.png"):
        with pytest.raises(UserError, match="not uploaded by a browser"):
            take_upload(sneaky, tmp_path / "sent")
    assert path.exists()
