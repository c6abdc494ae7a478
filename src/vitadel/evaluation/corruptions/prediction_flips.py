"""Sequences of slightly changing images: how often the prediction flips (ImageNet-P, arXiv:1903.12261)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from vitadel.corruptions.sequences import (
    CIFAR_SEQUENCES,
    FRAMES,
    IMAGENET_MOTION,
    IMAGENET_SEQUENCES,
    NOISE_SEQUENCES,
    SMALL,
    sequence,
)
from vitadel.data.batches import Batch
from vitadel.errors import UserError
from vitadel.evaluation.corruptions.benchmark_files import VideoSequences
from vitadel.evaluation.corruptions.scores import flips, top5_distances
from vitadel.evaluation.corruptions.sizes import Sizes
from vitadel.evaluation.engine.stages import BatchRecord, RunContext, refuse_lost_images, run_stage, running_share
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Source

_TOP = 5


def usual_sequences(size: tuple[int, int]) -> tuple[str, ...]:
    """The ten sequences that scores are means over: ImageNet-P's, or for small images CIFAR-P's."""
    return CIFAR_SEQUENCES if min(size) <= SMALL else IMAGENET_SEQUENCES


def sequence_stage(context: RunContext, name: str, indices: Tensor, difficulty: int, sizes: Sizes) -> list[BatchRecord]:
    """Make a sequence of every image; records how often its prediction flips and how far the top 5 move."""
    margin = _side_with_margin(sizes.made.shape)

    def work(number: int, batch: Batch) -> BatchRecord:
        refuse_lost_images(batch)
        rng = SampleRNG.of_samples(context.seed, batch.indices, context.processes.device)
        tops = []
        # Thirty frames of a whole batch at once would need thirty times the memory of other stages.
        for rows in torch.arange(len(batch.y)).split(max(1, context.batch_size // FRAMES)):
            if margin is None:
                frames = sequence(batch.x[rows], name, rng[rows], difficulty)
            else:  # pictures move as a whole, and have shapes of their own
                pictures = _whole_pictures(context.source, batch.indices[rows].tolist(), margin, batch.x.device)
                each = zip(pictures, rng[rows].keys.split(1), strict=True)
                frames = torch.cat([sequence(x, name, SampleRNG(key), difficulty) for x, key in each], 1)
            top = _top(context, sizes.fitted(frames.flatten(0, 1)))
            tops.append(top.view(*frames.shape[:2], -1).transpose(0, 1))
        return {"index": batch.indices.cpu().numpy(), **_sequence_scores(torch.cat(tops), name, difficulty)}

    return run_stage(
        replace(context, preprocess=sizes.made), f"sequence {name}", indices, work, running_share("flips", _flips)
    )


def video_stage(context: RunContext, name: str, images: VideoSequences, difficulty: int) -> list[BatchRecord]:
    """The same for videos, whose frames are the samples of the source."""
    frames = images.frames[name]
    length = frames.shape[1]
    whole = replace(context, batch_size=length * max(1, context.batch_size // length), skip_bad=False)
    numbers = dict(zip(frames[:, 0].tolist(), images.rows.tolist(), strict=True))

    def work(number: int, batch: Batch) -> BatchRecord:
        top = torch.cat([_top(context, part) for part in batch.x.split(context.batch_size)])
        first = batch.indices[::length].tolist()
        index = np.asarray([numbers[sample] for sample in first], dtype=np.int64)
        return {"index": index, **_sequence_scores(top.view(len(first), length, -1), name, difficulty)}

    return run_stage(whole, f"video {name}", frames.flatten(), work, running_share("flips", _flips))


def _side_with_margin(shape: tuple[int, int]) -> int | None:
    """The shorter side of pictures that move, at 224 pixels the 256 of ImageNet-P; None for small images, as CIFAR-P's.

    The benchmark resizes the whole picture and crops after the motion: what moves into the frame comes from outside of
    the crop, and black appears only where the picture ends.
    """
    height, width = shape
    if min(height, width) <= SMALL:
        return None
    if height != width:
        raise UserError(f"sequences are square, but these images have {height} x {width} pixels; drop --perturbations")
    return round(height / IMAGENET_MOTION.kept)


def _whole_pictures(source: Source, indices: Sequence[int], side: int, device: torch.device) -> list[Tensor]:
    """Pictures of any shape, (1, 3, height, width), with their shorter side resized."""
    pictures = []
    for image in source.read(indices):
        assert not isinstance(image, Exception)  # the batch that was read before holds them, too
        resized = resize(image, [side], InterpolationMode.BILINEAR)
        pixels = torch.from_numpy(np.array(resized, dtype=np.uint8)).permute(2, 0, 1)[None]
        pictures.append(pixels.to(device).float() / 255)
    return pictures


def _flips(record: BatchRecord) -> tuple[float, int]:
    return float(record["flips"].sum()), len(record["flips"])


@torch.no_grad()
def _top(context: RunContext, x: Tensor) -> Tensor:
    with context.arithmetic():
        logits: Tensor = context.model(x)
    # Stable, so that equal logits have one order, and the first of them is what argmax gives.
    return logits.sort(dim=1, descending=True, stable=True).indices[:, :_TOP]


def _sequence_scores(top: Tensor, name: str, difficulty: int) -> BatchRecord:
    """`top`: the most likely classes, (sequences, frames, 5)."""
    classes, noise = top.cpu().numpy(), name in NOISE_SEQUENCES
    return {
        "flips": flips(classes[..., 0], noise, difficulty),
        "distance": top5_distances(classes, noise, difficulty),
        "frames": np.asarray(classes.shape[1]),
    }
