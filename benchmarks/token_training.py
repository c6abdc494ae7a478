"""What one step of training robustness tokens costs, as a multiple of the bare passes that it needs.

    python benchmarks/token_training.py                    # the tiny ViT of the zoo, and DeiT-Ti with random weights
    python benchmarks/token_training.py --models zoo:shapes-standard --rounds 15 --out runs/benchmark-token-training

The floor is what the method asks for, on timm's modules alone: one pass for the clean features that the attack moves
away from, `steps` gradients of a cosine with respect to the images of the frozen model, one pass for the target, one
pass of clean and attacked images with the tokens in the sequence and its gradient with respect to the tokens, and
Adam's step. Floor and contender take turns, in an order that rotates, and are compared within their round; they get the
same images, attack steps and tokens. Reading images is not part of it. Time is that of this process on the processor,
so that other jobs on the machine count little.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from stepping import Step, opened, our_step, ratios_to, take_turns
from torch import Tensor
from torch.nn import functional as F

from vitadel.adapters.tokens.token_classifier import fresh_tokens
from vitadel.evaluation.engine.run import environment
from vitadel.instrument.tokens import token_width
from vitadel.runtime.run_folder import write_json
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose

EPS, LENGTH, RATE, COUNT = 8 / 255, 2 / 255, 1e-3, 10
AT_MOST = 1.1
MODELS = ("zoo:shapes-standard", "deit_tiny_patch16_224")
FLOOR, OURS = "the bare passes", "vitadel"


def cosine(features: Tensor, target: Tensor) -> Tensor:
    return F.cosine_similarity(features, target, dim=2).mean(1)


def floor(name: str, x: Tensor, steps: int) -> Step:
    classifier = opened(name).requires_grad_(False)
    net: Any = classifier.backbone
    tokens = torch.nn.Parameter(fresh_tokens(token_width(classifier), COUNT))
    optimizer = torch.optim.Adam([tokens], lr=RATE)

    def features(images: Tensor, extra: Tensor | None = None) -> Tensor:
        stream = net.patch_embed((images - classifier.mean) / classifier.std)
        stream = net.norm_pre(net._pos_embed(stream))
        if extra is not None:
            stream = torch.cat([stream, extra.expand(len(images), -1, -1)], 1)
        stream = net.blocks(stream)
        out: Tensor = net.norm(stream if extra is None else stream[:, : -len(extra)])
        return out

    def step() -> None:
        with torch.no_grad():
            clean = features(x)
        z = (x + LENGTH * torch.randn_like(x)).clamp(0, 1)
        for _ in range(steps):
            z.requires_grad_()
            (grad,) = torch.autograd.grad(cosine(features(z), clean).sum(), z)
            z = (z.detach() - LENGTH * grad.sign()).clamp(x - EPS, x + EPS).clamp(0, 1)
        with torch.no_grad():
            target = features(x)
        kept, regained = features(torch.cat([x, z]), tokens).chunk(2)
        (2 - cosine(kept, target).mean() - cosine(regained, target).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(name: str, x: Tensor, steps: int) -> Step:
    changes = {"train.batch_size": len(x), "objective.attack": f"features-{steps}(step={LENGTH},normed=true)"}
    recipe = build_recipe(compose("tokens/shapes", None, {**changes, "threat.eps": EPS}), "benchmark")
    return our_step(recipe, recipe.adapter.attach(opened(name)), x, torch.zeros(len(x), dtype=torch.int64))


def measure(name: str, batch: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round."""
    height, width = opened(name).record.input_size or (32, 32)
    x = torch.rand(batch, 3, height, width)
    crew = {FLOOR: floor(name, x, steps), OURS: ours(name, x, steps)}
    return take_turns(crew, rounds, time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the seconds there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title = f"one step, {options.steps} attack steps, batch {options.batch}, {options.rounds} rounds"
    table = Table("", "floor, s", "vitadel / floor, median", "quartiles", f"<= {AT_MOST}", title=title)
    results = {}
    for name in options.models:
        seconds = results[name] = measure(name, options.batch, options.steps, options.rounds)
        ratios = ratios_to(FLOOR, seconds)[OURS]
        low, middle, high = quantiles(ratios, n=4)
        good = "yes" if median(ratios) <= AT_MOST else "NO"
        table.add_row(name, f"{median(seconds[FLOOR]):.3f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", good)
    Console().print(table)
    if options.out:
        used = {key: str(value) for key, value in vars(options).items()}
        machine = environment(torch.device("cpu"), 1)
        write_json(options.out / "token_training.json", {"options": used, "environment": machine, "seconds": results})


if __name__ == "__main__":
    main()
