"""`imagenet-p:DIR`: ImageNet-P (Hendrycks & Dietterich 2019, arXiv:1903.12261), every frame of every video a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from vitadel.data.batches import skip_advice
from vitadel.data.images import LabeledImages
from vitadel.data.sources.folders import files_below
from vitadel.data.sources.imagenet import imagenet_classes, wnid_number
from vitadel.data.spec import DataRequest
from vitadel.errors import UserError


@dataclass(frozen=True, eq=False)
class VideoFrames(LabeledImages):
    """Frames in the order of the videos' paths; `parts` maps a video to its range of samples."""

    root: Path
    files: tuple[str, ...] = field(repr=False)
    first_frames: NDArray[np.int64] = field(repr=False)  # of each video; the last entry is the number of samples
    targets: Tensor = field(repr=False)
    skipped: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return imagenet_classes()

    @property
    def parts(self) -> dict[str, range]:
        first = self.first_frames.tolist()
        return {path: range(first[i], first[i + 1]) for i, path in enumerate(self.files)}

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        images: list[Image | Exception] = []
        places = [self._place(index) for index in indices]
        for video, run in groupby(places, key=lambda place: place[0]):
            wanted = [frame for _, frame in run]
            frames = _decode(self.root / self.files[video], set(wanted))
            images += [frames[frame] for frame in wanted]
        return images

    def name(self, index: int) -> str:
        video, frame = self._place(index)
        return f"{self.files[video]} frame {frame}"

    def _place(self, index: int) -> tuple[int, int]:
        video = int(np.searchsorted(self.first_frames, index, side="right")) - 1
        return video, index - int(self.first_frames[video])


def open_imagenet_p(request: DataRequest) -> VideoFrames:
    """Open DIR/perturbation/wnid/*.mp4, or one perturbation; the number of frames comes from each video's header."""
    request.read_settings()
    request.refuse_split()
    root = request.path("the folder of ImageNet-P, or of one perturbation")
    av = _av()
    files, counts, skipped = [], [], []
    for path in sorted(files_below(root, (".mp4",))):
        try:
            count = _count_frames(av, root / path)
        except (OSError, ValueError) as fault:  # PyAV's errors are among these
            if not request.skip_bad:
                raise UserError(
                    f"'{root / path}' cannot be read: {fault}; replace it"
                    f"{skip_advice(request.skip_bad, ', or skip it')}"
                ) from fault
            skipped.append(f"'{path}' cannot be read: {fault}")
            continue
        files.append(path)
        counts.append(count)
    if not sum(counts):
        raise UserError(f"'{root}' holds no videos; imagenet-p expects perturbation/wnid/*.mp4")
    labels = torch.tensor([wnid_number(path, root, request) for path in files])
    return VideoFrames(
        root=root,
        files=tuple(files),
        first_frames=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        targets=labels.repeat_interleave(torch.tensor(counts)),
        skipped=tuple(skipped),
    )


def _av() -> ModuleType:
    try:
        import av
    except ImportError:
        raise UserError("imagenet-p needs PyAV: pip install 'vitadel[video]' (or pip install av)") from None
    return cast(ModuleType, av)


def _count_frames(av: ModuleType, path: Path) -> int:
    with av.open(str(path)) as container:
        stream = _video(container)
        return stream.frames or sum(1 for _ in container.decode(stream))  # 0 where the header does not say


def _video(container: Any) -> Any:
    if not container.streams.video:
        raise ValueError("it contains no video")
    return container.streams.video[0]


def _decode(path: Path, wanted: set[int]) -> dict[int, Image | Exception]:
    """Decode the wanted frames of one video from its start, as each frame depends on earlier ones."""
    fault: Exception = EOFError("the video ends before this frame")
    frames: dict[int, Image | Exception] = {}
    try:
        with _av().open(str(path)) as container:
            for number, frame in enumerate(container.decode(_video(container))):
                if number in wanted:
                    frames[number] = frame.to_image()
                if len(frames) == len(wanted):
                    break
    except (OSError, ValueError) as error:
        fault = error
    return {number: frames.get(number, fault) for number in wanted}
