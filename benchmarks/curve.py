"""Compare minimal-norm attacks with foolbox's: the median distance at equal passes, and robust accuracy by budget.

    python benchmarks/curve.py                                         # zoo:shapes-robust, Linf, L2, L1 and L0
    python benchmarks/curve.py --norms l2 --images 16 --steps 20
    python benchmarks/curve.py --model zoo:cifar10-trades --data cifar10 --data-root DIR --seed 1

All attacks get the same correctly classified images, drawn class by class with the seed, and the whole box as budget. A
forward counts one pass, a gradient two, counted by hooks on the model. foolbox runs once with as many steps as ours; a
distance counts only if the model misclassifies the point, else it is infinite. `ratio` is ours over the best of
foolbox's in the same norm: at most 1.02 is the goal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.attacks.settings import training_form
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import balanced_subset, read_batches
from vitadel.evaluation.engine.stages import count_passes
from vitadel.evaluation.engine.target import open_target

OURS = {
    "linf": ("fmn", "bisect", "fab-t", "deepfool"),
    "l2": ("ddn", "fmn", "bisect", "superdeepfool", "deepfool", "fab-t"),
    "l1": ("fmn", "bisect", "fab-t", "deepfool"),
    "l0": ("fmn",),
}
PEERS = {
    "linf": ("LInfFMNAttack", "LinfDeepFoolAttack"),
    "l2": ("DDNAttack", "L2FMNAttack", "L2DeepFoolAttack"),
    "l1": ("L1FMNAttack",),
    "l0": ("L0FMNAttack",),
}

Run = Callable[[nn.Module, Tensor, Tensor], Tensor]


def scene(model: str, data: str, root: str | None, seed: int, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, and `count` images of the data with their labels."""
    target = open_target(model, data, data_root=root)
    chosen = balanced_subset(target.source.labels(), count, seed).tolist()
    batch = next(iter(read_batches(target.source, [chosen], target.preprocess)))
    return target.model.eval(), batch.x, batch.y


def attack_of_ours(name: str, norm: str, steps: int, values: int) -> Run:
    """With as many gradients as foolbox's, where an attack has more than one for each step."""
    whole = {"linf": 1.0, "l2": math.sqrt(values)}.get(norm, float(values))
    each = max(2, steps // 9)
    settings = {
        "fab-t": f"fab-t(steps={each})",
        "deepfool": f"deepfool-{each}",
        "superdeepfool": f"superdeepfool-{each}",
    }
    attack = training_form(make(settings.get(name, f"{name}-{steps}"), eps=whole, norm=norm))
    return lambda model, x, y: attack(model, x, y)


def attack_of_foolbox(name: str, steps: int) -> Run:
    foolbox: Any = import_module("foolbox")
    attack = getattr(foolbox.attacks, name)(steps=steps)

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        points: Tensor = attack(foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu"), x, y, epsilons=None)[0]
        return points

    return run


def candidates(norm: str, steps: int, values: int) -> dict[str, Run]:
    """foolbox's attacks of the norm, then ours."""
    theirs = {f"foolbox {name}": attack_of_foolbox(name, steps) for name in PEERS[norm]}
    return theirs | {name: attack_of_ours(name, norm, steps, values) for name in OURS[norm]}


def measured(model: nn.Module, norm: str, x: Tensor, y: Tensor, run: Run) -> tuple[Tensor, float]:
    """Distances, infinite where the point is not misclassified, and passes per image."""
    with count_passes(model) as cost:
        z = run(model, x, y).detach()
    with torch.no_grad():
        wrong = model(z).argmax(1) != y
    size = make_threat(norm, 1.0).size(z, x)
    return torch.where(wrong, size, torch.inf), (2 * cost.gradients + cost.forwards) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--data", default="shapes")
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--norms", default="linf,l2,l1,l0")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model, x, y = scene(given.model, given.data, given.data_root, given.seed, 4 * given.images)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).nonzero()[: given.images, 0]
    x, y = x[right], y[right]
    print(f"{given.model}, n = {len(x)}, {given.steps} steps, seed {given.seed}")
    print("| norm | attack | median distance | not found | passes per image | ratio |")
    print("|---|---|---|---|---|---|")
    for norm in given.norms.split(","):
        best = math.inf
        for name, run in candidates(norm, given.steps, x[0].numel()).items():
            found, passes = measured(model, norm, x, y, run)
            median, missing = float(found.median()), int(found.isinf().sum())
            if name.startswith("foolbox"):
                best = min(best, median)
            ratio = "" if name.startswith("foolbox") else f"{median / best:.3f}"
            print(f"| {norm} | {name} | {median:.5g} | {missing} | {passes:.0f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
