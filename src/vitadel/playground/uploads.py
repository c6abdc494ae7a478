"""Uploaded images: few types, limited in bytes and pixels, read in memory."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageOps

from vitadel.data.images import to_rgb
from vitadel.errors import UserError

FORMATS = ("PNG", "JPEG", "WEBP")
MOST_BYTES = 10 * 2**20
MOST_PIXELS = 25_000_000
"""Checked before decoding: a few kilobytes can hold an image that fills all memory."""

MOST_SIDE, MOST_RATIO = 10_000, 20
"""Preprocessing scales the shorter side to some hundred pixels: an image one pixel wide would become huge."""

_ALLOWED = (
    f"Upload a PNG, JPEG or WebP of at most {MOST_BYTES // 2**20} MB and {MOST_PIXELS // 10**6} million pixels, no "
    f"side over {MOST_SIDE:,} pixels or {MOST_RATIO} times the other."
)


def read_upload(content: bytes, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """The image as RGB, rotated by its EXIF orientation; the first frame of an animation."""
    if not content:
        raise UserError(f"the file is empty. {_ALLOWED}")
    if len(content) > MOST_BYTES:
        raise UserError(f"the file is too large. {_ALLOWED}")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            short, long = sorted(picture.size)
            if short * long > most_pixels:
                raise UserError(f"the image has {picture.width} x {picture.height} pixels, too many. {_ALLOWED}")
            if long > min(MOST_SIDE, MOST_RATIO * short):
                raise UserError(f"the image has {picture.width} x {picture.height} pixels, too long. {_ALLOWED}")
            return to_rgb(ImageOps.exif_transpose(picture))
    except UserError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UserError(f"the image has far too many pixels. {_ALLOWED}") from None
    except Exception:  # decoders of hostile bytes fail in many ways
        raise UserError(f"this is not an image that can be read. {_ALLOWED}") from None


def take_upload(path: Path, folder: Path) -> Image.Image:
    """Read the file that the server put into `folder`, and remove it whether it could be read or not."""
    if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
        raise UserError("this file was not uploaded by a browser; use the upload button")  # and is not ours to remove
    try:
        with path.open("rb") as file:
            return read_upload(file.read(MOST_BYTES + 1))
    finally:
        path.unlink(missing_ok=True)
