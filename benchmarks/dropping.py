"""What a sample costs once most of its batch is misclassified: gradients of 5 % of a batch against a full one.

    python benchmarks/dropping.py                                              # the tiny ViT of the zoo
    python benchmarks/dropping.py --model deit_tiny_patch16_224 --batch-size 40 --rounds 3
    python benchmarks/dropping.py --compile --bf16                             # the same, compiled, and in bfloat16

Attacks drop samples as they become misclassified, so the last ones are searched in small batches. Reported is the
processor time per sample and gradient, the median of several rounds in turn, and its ratio to a full batch: at most
1.15 is the goal. Weights do not matter for the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import OnLogits, gradient
from vitadel.backbones.load import load_model
from vitadel.instrument.hooks import frozen

SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)


def one_gradient(model: nn.Module, x: Tensor, bf16: bool) -> Callable[[], None]:
    """A gradient of the cross-entropy, as attacks take it."""
    aim = OnLogits()(model, x, torch.zeros(len(x), dtype=torch.int64))

    def take() -> None:
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            z = x.clone().requires_grad_()
            gradient(aim.evaluate(z, 0.0)[0], z)

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="compile the model for any batch size")
    parser.add_argument("--bf16", action="store_true", help="passes in bfloat16")
    given = parser.parse_args()
    spec = given.model
    model = (load_model(spec) if spec.startswith("zoo:") else load_model(spec, weights="random")).eval()
    side = 32 if spec.startswith("zoo:") else 224
    searched = torch.compile(model, dynamic=True) if given.compile else model
    sizes = [max(1, round(share * given.batch_size)) for share in SHARES]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(given.batch_size, 3, side, side, generator=generator)
    with frozen(model):
        works = {size: one_gradient(searched, x[:size], given.bf16) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for turn in range(given.rounds + 1):  # the first one warms up
            for size, work in works.items():
                repeats = max(1, round(given.batch_size / size / 2))
                start = time.process_time()
                for _ in range(repeats):
                    work()
                if turn:
                    seconds[size].append((time.process_time() - start) / repeats / size)
    full = median(seconds[given.batch_size])
    print("| model | samples | ms per sample and gradient | times a full batch |")
    print("|---|---|---|---|")
    for size in sizes:
        each = median(seconds[size])
        print(f"| {spec} | {size} | {1e3 * each:.2f} | {each / full:.2f} |")


if __name__ == "__main__":
    main()
