"""A small ImageNet-A, and a classifier that is right on part of it only when it may choose between the 200 classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

__all__ = ["RIGHT", "answering", "write_imagenet_a"]

# Class 6 three times, class 99 once; both are of ImageNet-A.
STINGRAY, GOOSE = "n01498041", "n01855672"
RIGHT = 3
"""How many of the four images `answering` gets right among the 200; none among the 1000."""


def write_imagenet_a(folder: Path) -> str:
    """Four images of 32 px; how the data are named."""
    for number, wnid in enumerate([STINGRAY, STINGRAY, STINGRAY, GOOSE]):
        path = folder / wnid / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)).save(path)
    return f"imagenet-a:{folder}"


def answering(head: nn.Linear) -> None:
    """Class 0, which ImageNet-A does not have, before class 6, whatever is seen."""
    with torch.no_grad():
        head.weight.mul_(1e-3)
        head.bias.zero_()
        head.bias[0], head.bias[6] = 9.0, 5.0
