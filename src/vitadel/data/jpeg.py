"""Ordinary JPEG files through simplejpeg, where it is installed: Pillow's pixels in less processor time.

Pillow and simplejpeg decode with the same library, libjpeg-turbo. Small images gain most, as Pillow does not read their
header either. Everything that is not ordinary is left to Pillow, with its rules and its messages.
"""

from __future__ import annotations

from PIL import Image, features

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_APP0, _COMMENT, _SCAN = 0xE0, 0xFE, 0xDA
_TABLES = frozenset([0xC4, 0xDB, 0xDD])  # Huffman codes, quantization, restart interval
_FRAMES = frozenset([0xC0, 0xC1, 0xC2])  # baseline, extended sequential, progressive
_COMPONENTS = {  # numbers of the components and their sampling factors
    (b"\1", b"\x11"),  # gray
    (b"\1\2\3", b"\x11\x11\x11"),  # 4:4:4
    (b"\1\2\3", b"\x21\x11\x11"),  # 4:2:2
    (b"\1\2\3", b"\x12\x11\x11"),  # 4:4:0
    (b"\1\2\3", b"\x22\x11\x11"),  # 4:2:0
}


def pillow_has_turbo() -> bool:
    """Whether Pillow decodes with libjpeg-turbo 3, as simplejpeg does; others may round differently."""
    return int((features.version("libjpeg_turbo") or "0").split(".")[0]) >= 3


_SAME_LIBRARY = pillow_has_turbo()


def decode_jpeg(content: bytes) -> Image.Image | None:
    """The RGB image of an ordinary JPEG file; None for any other file, which Pillow has to decode or to refuse."""
    if simplejpeg is None or not _SAME_LIBRARY or not _is_ordinary(content):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(content, "RGB", strict=True)
    except ValueError:  # libjpeg's errors, and warnings of damaged data
        return None
    return Image.frombuffer("RGB", (pixels.shape[1], pixels.shape[0]), pixels, "raw", "RGB", 0, 1)


def _is_ordinary(content: bytes) -> bool:
    """Whether the header has only what both read alike: no EXIF, ICC or Adobe data, one 8-bit frame, a usual size."""
    if not (content.startswith(b"\xff\xd8") and content.endswith(b"\xff\xd9")):
        return False
    place, known_frame = 2, False
    while place + 4 < len(content) and content[place] == 0xFF:
        kind, length = content[place + 1], content[place + 2] << 8 | content[place + 3]
        if kind == _SCAN:
            return known_frame
        if kind in _FRAMES:
            if known_frame or not _is_usual(content[place + 4 : place + 2 + length]):
                return False
            known_frame = True
        elif not (kind in _TABLES or kind == _COMMENT or (kind == _APP0 and length == 16)):  # 16: JFIF, no thumbnail
            return False
        place += 2 + length
    return False


def _is_usual(frame: bytes) -> bool:
    """Whether a frame has 8 bits, gray or YCbCr with a usual subsampling, and a size below Pillow's limit."""
    if len(frame) < 9 or frame[0] != 8 or (frame[6::3], frame[7::3]) not in _COMPONENTS:
        return False
    pixels = (frame[1] << 8 | frame[2]) * (frame[3] << 8 | frame[4])
    return 0 < pixels <= (Image.MAX_IMAGE_PIXELS or pixels)
