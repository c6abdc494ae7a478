"""What augmentation costs while reading, image by image, and on the device, batch by batch, here the CPU.

python benchmarks/augmentation.py                            # crop and flip of 32-pixel images
python benchmarks/augmentation.py --color-jitter 0.4 --reprob 0.25

Both ways take the same images through a training's stream, in this process, to floats in [0, 1]; the floor reads them
without augmentation. They take turns, in an order that rotates, and are compared within their round. Time is that of
this process on the processor, so that other jobs on the machine count little.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from statistics import median, quantiles

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from stepping import Step, ratios_to, take_turns
from torch import Tensor

from vitadel.data.batches import Preprocess
from vitadel.training.data_stream import DataStream, make_augment, make_device_augmentation
from vitadel.training.recipes.training_sections import Augmentation

FLOOR, READING, DEVICE = "no augmentation", "while reading", "on the device"


@dataclass(frozen=True)
class Noise:
    """Images of noise in memory, as CIFAR is."""

    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    classes: tuple[str, ...] = ("noise",)

    def __len__(self) -> int:
        return len(self.pixels)

    def labels(self) -> Tensor:
        return torch.zeros(len(self), dtype=torch.int64)

    def read(self, indices: list[int]) -> list[Image.Image | Exception]:
        return [Image.fromarray(self.pixels[index]) for index in indices]

    def name(self, index: int) -> str:
        return str(index)


def reading(source: Noise, section: Augmentation, batch: int) -> Step:
    """One epoch of the stream, to floats on the CPU."""
    preprocess, rows = Preprocess(source.pixels.shape[1]), torch.arange(len(source))
    late = make_device_augmentation(section, preprocess)
    stream = DataStream(source, rows, preprocess, make_augment(section, preprocess), batch, on_device=late)

    def step() -> None:
        for (part,) in stream.steps(0, stream.steps_per_epoch):
            part.to(torch.device("cpu"))

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--color-jitter", type=float, default=0.0)
    parser.add_argument("--reprob", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = (options.images, options.size, options.size, 3)
    source = Noise(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))
    section = Augmentation(crop="pad", hflip=0.5, color_jitter=options.color_jitter, reprob=options.reprob)
    sections = {FLOOR: Augmentation(on_device=True), READING: section, DEVICE: replace(section, on_device=True)}
    steps = {name: reading(source, each, options.batch) for name, each in sections.items()}
    seconds = take_turns(steps, options.rounds, time.process_time)
    ratios = ratios_to(READING, seconds)
    title = f"{options.images} images of {options.size} pixels, batches of {options.batch}, {options.rounds} rounds"
    table = Table("", "microseconds an image", f"/ {READING}, median", "quartiles", title=title)
    for name in steps:
        low, middle, high = quantiles(ratios[name], n=4)
        each = 1e6 * median(seconds[name]) / options.images
        table.add_row(name, f"{each:.1f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
