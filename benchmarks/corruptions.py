"""Speed of the 19 corruptions here and in `imagecorruptions-imaug`, per image, with one thread each.

    python benchmarks/corruptions.py                       # all corruptions and severities at 32 and 224 pixels
    python benchmarks/corruptions.py --sizes 32 --names frost,zoom_blur --rounds 5

Both take and return a batch of float pixels, so both pay for the conversion to 8 bits and back. They take turns on the
same images; the result is the median over rounds of the ratio of CPU times, which other load disturbs least. Ours
corrupts the batch, theirs one image after the other.

Constants: at 224 pixels both use ImageNet-C's. At 32 pixels ours uses CIFAR-C's and theirs ImageNet-C's, which are its
only ones; `--same-constants` adds a column for ours with ImageNet-C's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Sheet
from torch import Tensor

from vitadel.corruptions import COMMON, EXTRA, SEVERITIES, corrupt
from vitadel.corruptions.constants import table_for
from vitadel.data.sources.shapes import Shapes
from vitadel.evaluation.engine.run import environment
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_json

Run = Callable[[Tensor, str, int], Tensor]


@dataclass(frozen=True)
class Measured:
    """Milliseconds of processor time per image over all severities, and theirs : ours.

    `same`: ours with ImageNet-C's constants, which theirs always uses; None where that was not measured.
    """

    size: int
    name: str
    ours: float
    theirs: float
    ratio: float
    same: float | None
    same_ratio: float | None


def ours(x: Tensor, name: str, severity: int, constants: int | None = None) -> Tensor:
    return corrupt(x, name, severity, SampleRNG.of_samples(0, range(len(x))), constants=constants)


ours_with_same = partial(ours, constants=224)


def theirs(x: Tensor, name: str, severity: int) -> Tensor:
    function = import_module("imagecorruptions").corrupt
    arrays = x.mul(255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # spatter divides by zero on dry images
        changed = np.stack([function(array, severity=severity, corruption_name=name) for array in arrays])
    return torch.from_numpy(changed).permute(0, 3, 1, 2).float().div_(255)


def seconds(run: Run, x: Tensor, name: str, severity: int) -> float:
    start = time.process_time()
    run(x, name, severity)
    return time.process_time() - start


def _one_turn(runs: list[Run], x: Tensor, name: str, severity: int, number: int) -> list[float]:
    """Seconds of each. The order rotates, as the first finds the caches of the others."""
    order = [(number + place) % len(runs) for place in range(len(runs))]
    spent = {place: seconds(runs[place], x, name, severity) for place in order}
    return [spent[place] for place in range(len(runs))]


def measure(x: Tensor, name: str, rounds: int, same_constants: bool) -> Measured:
    runs: list[Run] = [ours, theirs, *([ours_with_same] if same_constants else [])]
    for run in runs:  # warm-up: tables, photos and compiled code
        for severity in SEVERITIES:
            run(x[:2], name, severity)
    turns = [
        np.sum([_one_turn(runs, x, name, severity, number) for severity in SEVERITIES], 0) for number in range(rounds)
    ]
    times = np.median(turns, axis=0) * 1000 / len(x)
    ratios = np.median([turn[1] / turn for turn in turns], axis=0)
    same, same_ratio = (float(times[2]), float(ratios[2])) if same_constants else (None, None)
    return Measured(x.shape[-1], name, float(times[0]), float(times[1]), float(ratios[0]), same, same_ratio)


def show(rows: list[Measured]) -> None:
    own, other = sum(row.ours for row in rows), sum(row.theirs for row in rows)
    sheet = Sheet("", "vitadel, ms", "imagecorruptions, ms", "times faster", "with the same constants")
    for row in rows:
        same = "" if row.same_ratio is None else f"{row.same_ratio:.1f}"
        sheet.add_row(row.name, f"{row.ours:.2f}", f"{row.theirs:.2f}", f"{row.ratio:.1f}", same)
    alike = [row.same for row in rows if row.same is not None]
    last = f"{other / sum(alike):.1f}" if alike else ""
    sheet.add_row("all", f"{own:.2f}", f"{other:.2f}", f"{other / own:.1f}", last)
    Console(width=100).print(f"{rows[0].size} px, 5 severities", sheet)


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
    measured: list[Measured] = []
    for size in map(int, given.sizes.split(",")):
        images = given.images or (64 if size <= 64 else 8)
        x = Shapes(size=size).render(range(images))[0].float() / 255
        same = given.same_constants and table_for(size, size).size != 224
        rows = [measure(x, name, given.rounds, same) for name in given.names.split(",")]
        show(rows)
        measured += rows
    path = given.out / "corruptions.json"
    write_json(path, {"environment": environment(torch.device("cpu"), 1), "rows": [asdict(row) for row in measured]})
    print(path)


if __name__ == "__main__":
    main()
