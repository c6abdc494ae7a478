"""Pictures for the tests of corruptions: smooth colors with some grain, as 8-bit arrays and as floats."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


def pictures(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Float pixels (n, 3, height, width), whole levels."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 7, 7, generator=generator)
    fine = torch.rand(count, 3, height, width, generator=generator)
    smooth = F.interpolate(coarse, size=(height, width), mode="bilinear", align_corners=True)
    return (0.8 * smooth + 0.2 * fine).mul(255).round().div(255)


def array(x: Tensor) -> NDArray[np.uint8]:
    """One image (3, height, width) as rows of RGB bytes."""
    return x.mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def assert_levels_agree(ours: NDArray[np.uint8], theirs: NDArray[np.uint8], apart: float = 1e-3) -> None:
    """Equal but for rounding: never more than one level apart, and that in a share `apart` of the values at most."""
    difference = np.abs(ours.astype(int) - theirs.astype(int))
    assert difference.max(initial=0) <= 1
    assert (difference > 0).mean() <= apart
