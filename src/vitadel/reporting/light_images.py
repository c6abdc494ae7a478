"""Images of a page that would become too large: photographs as JPEG, small images pixel by pixel as before."""

from __future__ import annotations

import base64
import io
import re

from PIL import Image

__all__ = ["with_lighter_images"]

_PNG = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=]{26000,})")  # none of 64 pixels, whose every pixel can be seen
_QUALITY = 85


def with_lighter_images(markup: str) -> str:
    """The same figure, with large opaque images in fewer bytes; changes as faint as a perturbation may get lost."""
    return _PNG.sub(lambda found: min(found[0], _as_jpeg(found[1]) or found[0], key=len), markup)


def _as_jpeg(png: str) -> str | None:
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        if "A" in image.mode and image.getchannel("A").getextrema() != (255, 255):
            return None
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=_QUALITY, subsampling=0)  # enlarged, they are coloured noise
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
