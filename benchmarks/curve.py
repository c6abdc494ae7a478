"""Compare minimal-norm attacks with foolbox's: the median distance at equal passes, and robust accuracy by budget.

    python benchmarks/curve.py                                         # zoo:shapes-robust, Linf, L2, L1 and L0
    python benchmarks/curve.py --norms l2 --images 16 --steps 20

All attacks get the same correctly classified images and the whole box as budget. A forward counts one pass, a gradient
two, counted by hooks on the model. foolbox runs once with as many steps as ours; a distance counts only if the model
misclassifies the point, else it is infinite. `ratio` is ours over the best of foolbox's in the same norm: at most 1.02
is the goal.
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
from vitadel.backbones.load import load_model
from vitadel.data.sources.shapes import Shapes
from vitadel.evaluation.engine.stages import count_passes

OURS = {
    "linf": ("fmn", "bisect", "fab-t"),
    "l2": ("ddn", "fmn", "bisect", "superdeepfool"),
    "l1": ("fmn", "bisect", "fab-t"),
    "l0": ("fmn",),
}
PEERS = {
    "linf": ("LInfFMNAttack", "LinfDeepFoolAttack"),
    "l2": ("DDNAttack", "L2FMNAttack", "L2DeepFoolAttack"),
    "l1": ("L1FMNAttack",),
    "l0": ("L0FMNAttack",),
}


def attack_of_ours(name: str, norm: str, steps: int, values: int) -> Any:
    """With as many gradients as foolbox's, where an attack has more than one for each step."""
    whole = {"linf": 1.0, "l2": math.sqrt(values)}.get(norm, float(values))
    settings = {"fab-t": f"fab-t(steps={max(1, steps // 9)})", "superdeepfool": f"superdeepfool-{max(2, steps // 9)}"}
    return training_form(make(settings.get(name, f"{name}-{steps}"), eps=whole, norm=norm))


def measured(model: nn.Module, norm: str, x: Tensor, y: Tensor, run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Distances, infinite where the point is not misclassified, and passes per image."""
    with count_passes(model) as cost:
        z = run().detach()
    with torch.no_grad():
        wrong = model(z).argmax(1) != y
    size = make_threat(norm, 1.0).size(z, x)
    return torch.where(wrong, size, torch.inf), (2 * cost.gradients + cost.forwards) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--norms", default="linf,l2,l1,l0")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    foolbox = import_module("foolbox")
    model = load_model(given.model).eval()
    pixels, labels, _ = Shapes("test").render(range(2 * given.images))
    x, y = pixels.float() / 255, torch.as_tensor(labels)
    with torch.no_grad():
        right = (model(x).argmax(1) == y).nonzero()[: given.images, 0]
    x, y = x[right], y[right]
    peer = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    print("| norm | attack | median distance | not found | passes per image | ratio |")
    print("|---|---|---|---|---|---|")
    for norm in given.norms.split(","):
        rows: list[tuple[str, float, int, float]] = []
        for name in PEERS[norm]:
            theirs = getattr(foolbox.attacks, name)(steps=given.steps)
            found, passes = measured(model, norm, x, y, lambda a=theirs: a(peer, x, y, epsilons=None)[0])
            rows.append((f"foolbox {name}", float(found.median()), int(found.isinf().sum()), passes))
        best = min(median for _, median, _, _ in rows)
        for name in OURS[norm]:
            ours = attack_of_ours(name, norm, given.steps, x[0].numel())
            found, passes = measured(model, norm, x, y, lambda a=ours: a(model, x, y))
            rows.append((name, float(found.median()), int(found.isinf().sum()), passes))
        for name, median, missing, passes in rows:
            print(f"| {norm} | {name} | {median:.5g} | {missing} | {passes:.0f} | {median / best:.3f} |", flush=True)


if __name__ == "__main__":
    main()
