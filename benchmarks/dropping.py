"""What a sample costs once most of its batch is misclassified: gradients of 5 % of a batch against a full one.

    python benchmarks/dropping.py                                              # the tiny ViT of the zoo
    python benchmarks/dropping.py --model deit_tiny_patch16_224 --batch-size 40 --rounds 3
    python benchmarks/dropping.py --ways plain,dynamic,static,bf16             # compiled, and in bfloat16, in one run

Attacks drop samples as they become misclassified, so the last ones are searched in small batches. Reported is the
processor time per sample and gradient, the median of several rounds in turn, and its ratio to a full batch: at most
1.15 is the goal. `dynamic` is compiled once for any batch size, `static` for each size alone, as padding to a few sizes
would need it; `gain` is the time of `plain` over theirs. Weights do not matter for the time.
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
WAYS = ("plain", "dynamic", "static", "bf16")


def one_gradient(model: nn.Module, x: Tensor, way: str) -> Callable[[], None]:
    """A gradient of the cross-entropy, as attacks take it."""
    searched = torch.compile(model, dynamic=way == "dynamic") if way in ("dynamic", "static") else model
    aim = OnLogits()(searched, x, torch.zeros(len(x), dtype=torch.int64))

    def take() -> None:
        with torch.autocast("cpu", torch.bfloat16) if way == "bf16" else nullcontext():
            z = x.clone().requires_grad_()
            gradient(aim.evaluate(z, 0.0)[0], z)

    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="zoo:shapes-robust")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", default="plain", help=f"comma-separated, of {', '.join(WAYS)}")
    given = parser.parse_args()
    spec, ways = given.model, given.ways.split(",")
    model = (load_model(spec) if spec.startswith("zoo:") else load_model(spec, weights="random")).eval()
    side = 32 if spec.startswith("zoo:") else 224
    sizes = [max(1, round(share * given.batch_size)) for share in SHARES]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(given.batch_size, 3, side, side, generator=generator)
    with frozen(model):
        works = {(way, size): one_gradient(model, x[:size], way) for way in ways for size in sizes}
        first: dict[str, float] = dict.fromkeys(ways, 0.0)
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in works}
        for turn in range(given.rounds + 1):  # the first one warms up, and compiles
            for (way, size), work in works.items():
                repeats = max(1, round(given.batch_size / size / 2)) if turn else 1
                start = time.process_time()
                for _ in range(repeats):
                    work()
                passed = time.process_time() - start
                if turn:
                    seconds[way, size].append(passed / repeats / size)
                else:
                    first[way] += passed
    print("| model | way | samples | ms per sample and gradient | times a full batch | gain |")
    print("|---|---|---|---|---|---|")
    for way, size in works:
        each, full, plain = (median(seconds[key]) for key in ((way, size), (way, sizes[0]), (ways[0], size)))
        print(f"| {spec} | {way} | {size} | {1e3 * each:.2f} | {each / full:.2f} | {plain / each:.2f} |")
    print("seconds of the first gradients:", ", ".join(f"{way} {passed:.0f}" for way, passed in first.items()))


if __name__ == "__main__":
    main()
