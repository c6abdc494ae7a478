"""What it would cost that the projection onto the L1 ball never makes the CPU wait for a GPU.

    OMP_NUM_THREADS=1 python benchmarks/l1_projection.py

The projection searches a shift for each image by Newton's method and looks after each step whether all are found, which
is a wait on a GPU. Without looking it has to take as many steps as the hardest batch may need. Both find the same
shifts; printed is the ratio of their processor times, as the median of rounds in turns.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor

from vitadel.attacks.threats import shift_to_budget


def shift_without_looking(reach: Tensor, room: Tensor, eps: float, steps: int) -> Tensor:
    """The same search with a fixed number of steps."""
    low, high = torch.zeros_like(reach[:, 0]), reach.amax(1)
    shift = low
    for _ in range(steps):
        left = reach - shift[:, None]
        over = torch.minimum(left.clamp(min=0), room).sum(1) - eps
        open_ = (over > 1e-12 * eps) | ((over < -1e-12 * eps) & (shift > 0))
        low, high = torch.where(over > 0, shift, low), torch.where(over > 0, high, shift)
        newton = shift + over / ((left > 0) & (left < room)).sum(1).clamp(min=1)
        inside = (newton > low) & (newton < high)
        shift = torch.where(open_, torch.where(inside, newton, (low + high) / 2), shift)
    return shift


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="of the search that never looks")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    print("| images | processor time without looking, times that with | the same shifts |")
    print("|---|---|---|")
    for images, size in ((8, 224), (64, 32)):
        drawn = torch.Generator().manual_seed(0)
        x = torch.rand(images, 3 * size * size, generator=drawn, dtype=torch.float64)
        change = torch.randn(x.shape, generator=drawn, dtype=torch.float64) * 0.1
        reach, room = change.abs(), torch.where(change > 0, 1 - x, x)
        looking, fixed, same = [], [], True
        for _ in range(arguments.rounds):
            start = time.process_time()
            found = shift_to_budget(reach, room, 12.0)
            middle = time.process_time()
            again = shift_without_looking(reach, room, 12.0, arguments.steps)
            looking.append(middle - start)
            fixed.append(time.process_time() - middle)
            same &= bool(torch.allclose(found, again, rtol=0, atol=1e-9))
        print(
            f"| {images} of {size} px | {median(fixed) / median(looking):.1f} | {'yes' if same else 'no'} |", flush=True
        )


if __name__ == "__main__":
    main()
