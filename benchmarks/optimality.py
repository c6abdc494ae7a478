"""Compare minimal-norm attacks by AttackBench's optimality: how near the best known robustness curve each one comes.

    python benchmarks/optimality.py                                              # zoo:shapes-robust, Linf, L2, L1, L0
    python benchmarks/optimality.py --attackbench                                # measured by attackbenchlib
    python benchmarks/optimality.py --models zoo:shapes-robust,zoo:shapes-trades --norms l2 --images 16

The definitions of AttackBench (Cina et al. 2025, arXiv:2404.19460): the robustness curve of an attack is the share of
images whose smallest adversarial perturbation found is larger than a size; the best known one has for each image the
smallest of all attacks, and ends at size e, where no image is robust. Local optimality is the area that an attack takes
off the rectangle of clean accuracy and e, over the area that the best known one takes off: 1 is as good as all attacks
together, 0 finds nothing. Global optimality is its mean over models. The median distance is that of the correctly
classified images, on each model.

All attacks get the same images, misclassified ones included, and the same budget of propagations, where a forward
counts one and a backward one. Attacks with steps get as many as the budget has room for. `--attackbench` runs them
inside attackbenchlib (pip install attackbenchlib), which enforces the budget and takes the best of all points asked;
else the returned points are judged and the passes counted by hooks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from curve import Run, candidates, measured, scene
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Measured:
    """What an attack found on the images of a model: a distance for each, and propagations per image."""

    distances: np.ndarray  # 0 for a misclassified image, infinite where nothing was found
    propagations: float


def area_below(distances: np.ndarray, end: float) -> float:
    """The area below the robustness curve up to `end`: the mean distance, where none counts beyond the end."""
    return float(np.minimum(distances, end).mean())


def local_optimality(distances: np.ndarray, best: np.ndarray) -> float:
    """The area that an attack takes off, over that of the best known distances; NaN if these take off nothing.

    Where the best known curve does not reach zero, it ends at its largest finite distance.
    """
    finite = best[np.isfinite(best)]
    if len(finite) == 0:
        return math.nan
    end, clean = float(finite.max()), float((best > 0).mean())
    most = clean * end - area_below(best, end)
    return (clean * end - area_below(distances, end)) / most if most > 0 else math.nan


def best_known(found: Mapping[str, Measured]) -> np.ndarray:
    """The smallest distance of all attacks, for each image."""
    smallest: np.ndarray = np.minimum.reduce([each.distances for each in found.values()])
    return smallest


def measure(run: Run, model: nn.Module, norm: str, x: Tensor, y: Tensor) -> Measured:
    found, passes = measured(model, norm, x, y, run)
    with torch.no_grad():
        wrong = model(x).argmax(1) != y
    return Measured(torch.where(wrong, 0.0, found).double().numpy(), passes)


def measure_by_attackbench(run: Run, model: nn.Module, norm: str, x: Tensor, y: Tensor, budget: int) -> Measured:
    """The library's own protocol: it counts each image's propagations and answers no more than `budget` of them."""
    library = import_module("attackbench")

    def attack(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return run(model, inputs, labels)

    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
    results = library.run_attack(model, loader, attack, norm, torch.device("cpu"), query_budget=budget, debug=True)
    asked = np.asarray(results["num_forwards"]) + np.asarray(results["num_backwards"])
    return Measured(np.asarray(results["distances"][norm], dtype=float), float(asked.mean()))


HEAD = "| norm | attack | propagations per image | not found | median distance | optimality | of each model |"


def table(norm: str, found: list[dict[str, Measured]]) -> list[str]:
    """A row for each attack, the best one first; `found` has the attacks of each model."""
    best = [best_known(attacks) for attacks in found]
    rows: list[tuple[float, str]] = []
    for name in found[0]:
        each = [attacks[name] for attacks in found]
        local = [local_optimality(one.distances, known) for one, known in zip(each, best, strict=True)]
        missing, cost = sum(int(np.isinf(one.distances).sum()) for one in each), np.mean([o.propagations for o in each])
        medians = ", ".join(f"{np.median(one.distances[known > 0]):.4g}" for one, known in zip(each, best, strict=True))
        of_each, score = ", ".join(f"{value:.3f}" for value in local), float(np.mean(local))
        rows.append((score, f"| {norm} | {name} | {cost:.0f} | {missing} | {medians} | {score:.3f} | {of_each} |"))
    return [row for _, row in sorted(rows, key=lambda row: row[0], reverse=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="zoo:shapes-robust", help="comma-separated")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--norms", default="linf,l2,l1,l0")
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--budget", type=int, default=1000, help="forward and backward propagations per image")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackbench", action="store_true", help="run the attacks inside attackbenchlib")
    given = parser.parse_args()
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for norm in given.norms.split(","):
        found: list[dict[str, Measured]] = []
        for spec in given.models.split(","):
            model, x, y = scene(spec, given.data, given.data_root, given.seed, given.images)
            steps = (given.budget - 2) // 2  # each is a forward and a backward
            found.append({})
            for name, run in candidates(norm, steps, x[0].numel()).items():
                if given.attackbench:
                    found[-1][name] = measure_by_attackbench(run, model, norm, x, y, given.budget)
                else:
                    found[-1][name] = measure(run, model, norm, x, y)
        print(*table(norm, found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
