"""What the 19 corruptions cost here and in `imagecorruptions-imaug`, image by image, with one thread each.

    python benchmarks/corruptions.py                       # all corruptions and severities at 32 and 224 pixels
    python benchmarks/corruptions.py --sizes 32 --names frost,zoom_blur --rounds 5

Both get a batch of float pixels as a data loader gives it and return such a batch for the model, so both pay for the
way to 8 bits and back. They take turns on the same images, and what counts is the median over rounds of their ratio in
processor time, which other work on the machine disturbs least. Ours corrupts the batch, theirs image after image.

Constants: at 224 pixels both use ImageNet-C's, at 32 pixels ours uses CIFAR-C's and theirs, which has no others,
ImageNet-C's; `--same-constants` gives us ImageNet-C's there as well.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Sheet
from torch import Tensor

from vitadel.corruptions import COMMON, EXTRA, SEVERITIES, corrupt
from vitadel.data.shapes import Shapes
from vitadel.runtime.draws import Draws
from vitadel.runtime.environment import environment
from vitadel.runtime.rundir import write_json

Run = Callable[[Tensor, str, int], Tensor]


@dataclass(frozen=True)
class Measured:
    """Milliseconds of processor time per image over all severities, and theirs : ours."""

    size: int
    name: str
    ours: float
    theirs: float
    ratio: float


def ours(same_constants: bool) -> Run:
    def run(x: Tensor, name: str, severity: int) -> Tensor:
        draws = Draws.of_samples(0, range(len(x)))
        return corrupt(x, name, severity, draws, constants=224 if same_constants else None)

    return run


def theirs(x: Tensor, name: str, severity: int) -> Tensor:
    function = import_module("imagecorruptions").corrupt
    arrays = x.mul(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # spatter divides by zero where nothing is wet
        changed = np.stack([function(array, severity=severity, corruption_name=name) for array in arrays])
    return torch.from_numpy(changed).permute(0, 3, 1, 2).float().div_(255)


def seconds(run: Run, x: Tensor, name: str, severity: int) -> float:
    start = time.process_time()
    run(x, name, severity)
    return time.process_time() - start


def measure(x: Tensor, name: str, mine: Run, rounds: int) -> Measured:
    both: list[tuple[float, float]] = []
    for run in (mine, theirs):  # tables, photos and compiled code are made once
        for severity in SEVERITIES:
            run(x[:2], name, severity)
    for _ in range(rounds):
        own, other = 0.0, 0.0
        for severity in SEVERITIES:
            own += seconds(mine, x, name, severity)
            other += seconds(theirs, x, name, severity)
        both.append((own, other))
    scale = 1000 / len(x)
    own, other = (median(times) * scale for times in zip(*both, strict=True))
    return Measured(x.shape[-1], name, own, other, median(second / first for first, second in both))


def show(rows: list[Measured]) -> None:
    own, other = sum(row.ours for row in rows), sum(row.theirs for row in rows)
    sheet = Sheet("", "vitadel, ms", "imagecorruptions, ms", "times faster", title=f"{rows[0].size} px, 5 severities")
    for row in rows:
        sheet.add_row(row.name, f"{row.ours:.2f}", f"{row.theirs:.2f}", f"{row.ratio:.1f}")
    sheet.add_row("all", f"{own:.2f}", f"{other:.2f}", f"{other / own:.1f}")
    Console(width=100).print(sheet)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="32,224", help="comma-separated")
    parser.add_argument("--names", default=",".join((*COMMON, *EXTRA)), help="comma-separated")
    parser.add_argument("--images", type=int, default=None, help="default: 64 at up to 64 pixels, else 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same-constants", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-corruptions"))
    return parser.parse_args()


def main() -> None:
    given = read_arguments()
    torch.set_num_threads(1)
    import_module("cv2").setNumThreads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    told: list[Measured] = []
    for size in map(int, given.sizes.split(",")):
        images = given.images or (64 if size <= 64 else 8)
        x = Shapes(size=size).render(range(images))[0].float() / 255
        rows = [measure(x, name, ours(given.same_constants), given.rounds) for name in given.names.split(",")]
        show(rows)
        told += rows
    path = given.out / "corruptions.json"
    write_json(path, {"environment": environment(torch.device("cpu"), 1), "rows": [asdict(row) for row in told]})
    print(path)


if __name__ == "__main__":
    main()
