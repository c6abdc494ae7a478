"""Small videos whose frames a test knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["write_video"]


def write_video(path: Path, levels: Sequence[int]) -> None:
    """One frame of 32 x 32 pixels per gray level; the codec keeps them to a few levels."""
    import av  # here, as tests that need it are skipped where it is missing

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.bit_rate = 4_000_000
        for level in levels:
            pixels = np.full((32, 32, 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
