"""Why AFAT's opponent is hardly better than chance: its gain on a frozen model, by the rule it learns with.

python benchmarks/afat_opponent.py MODEL DATA [--rules straight-through credited ...]

Every rule trains a corruption model for 150 steps of 24 images, by SGD with the gradient scaled to length 5 unless said
otherwise, and is measured on 192 other images: the alignment loss under its masks over that under random masks with the
same noise, with the 95 % interval over images. `perfect` chooses for each image the patches that do most damage alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.patches.corruption_model import CorruptionModel, corrupted, keep_mask, normalize_like
from vitadel.attacks.patches.patch_threat import count_of_share, patch_side_of, patches_in, strongest
from vitadel.attacks.patches.random_patches import uniform_noise
from vitadel.backbones.anatomy import main_blocks
from vitadel.backbones.load import load_model
from vitadel.data.batches import Preprocess, read_batches
from vitadel.data.spec import open_dataset
from vitadel.instrument.hooks import block_features, frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.statistics import bootstrap_ratio

TRAINED, PROBED, BATCH, STEPS, SHARE = 512, 192, 24, 150, 0.1


@dataclass(frozen=True)
class Rule:
    """How the opponent learns: `tries` its own choice or random patches, with noise of `strength`, by a `soft` mask."""

    rate: float
    tries: str = "own"
    strength: str = "full"
    credited: bool = False
    soft: float | None = None
    length: float | None = 5.0
    start: float = 1.0
    seed: int = 0


RULES = {
    "straight-through": Rule(1e-4),
    "straight-through, not scaled": Rule(1e-4, length=None),
    "straight-through, rate 5e-3": Rule(5e-3),
    "straight-through, rate 5e-3, seed 1": Rule(5e-3, seed=1),
    "straight-through, rate 5e-3, start x 0.1": Rule(5e-3, start=0.1),
    "straight-through, rate 5e-3, mask temperature 0.05": Rule(5e-3, soft=0.05),
    "credited, own choice": Rule(5e-3, credited=True, strength="random"),
    "credited, full noise": Rule(5e-3, credited=True, tries="random"),
    "credited, rate 1e-4": Rule(1e-4, credited=True, tries="random", strength="random"),
    "credited": Rule(5e-3, credited=True, tries="random", strength="random"),
    "credited, seed 1": Rule(5e-3, credited=True, tries="random", strength="random", seed=1),
}


class Bench:
    """A frozen model, images to learn from, and others to measure on."""

    def __init__(self, name: str, data: str) -> None:
        self.model = load_model(name).eval()
        record = self.model.record
        preprocess = Preprocess(record.input_size or 32, record.crop_pct, record.interpolation)
        rows = [list(range(TRAINED + PROBED))]
        x = torch.cat([batch.x for batch in read_batches(open_dataset(data), rows, preprocess)])
        self.images, self.probe = x[:TRAINED], x[TRAINED:]
        self.side = patch_side_of(self.model, x[:1])
        self.grid = patches_in(x[:1], self.side)
        self.patches = self.grid[0] * self.grid[1]
        self.count = count_of_share(SHARE, self.patches)
        rng = SampleRNG.of_samples(0, range(PROBED))
        self.noise = uniform_noise(self.model, self.probe, rng.stream("noise"))
        with torch.no_grad():
            self.clean = self.features(self.probe)
            masks = [(rng.stream("r", k).permutation(self.patches) >= self.count).float() for k in range(4)]
            self.by_chance = torch.stack([self.harm(mask) for mask in masks]).mean(0)

    def features(self, x: Tensor) -> list[Tensor]:
        with block_features(self.model, main_blocks(self.model)) as seen:
            self.model(x)
            return list(seen)

    def harm(self, keep: Tensor) -> Tensor:
        return distance(self.features(corrupted(self.probe, keep, self.noise, self.side)), self.clean)

    def gain(self, keep: Tensor) -> str:
        with torch.no_grad():
            ours, others = self.harm(keep).numpy(), self.by_chance.numpy()
        low, high = bootstrap_ratio(ours, others)
        return f"{ours.mean() / others.mean():.3f} ({low:.3f} to {high:.3f})"

    def perfect(self) -> Tensor:
        with torch.no_grad():
            alone = [(torch.arange(self.patches) != k).float().expand(PROBED, -1) for k in range(self.patches)]
            return (~strongest(torch.stack([self.harm(keep) for keep in alone], 1), self.count)).float()


def distance(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    return torch.stack([(a - b).square().flatten(1).mean(1) for a, b in zip(ours, theirs, strict=True)]).mean(0)


def ascended(bench: Bench, rule: Rule, scores: Tensor, rng: SampleRNG, damage: Callable[[Tensor], Tensor]) -> Tensor:
    """What the rule ascends: a number whose gradient reaches the scores."""
    if not rule.credited:
        keep = keep_mask(scores, bench.count)
        if rule.soft is not None:
            edge = scores.detach().sort(1).values[:, bench.count - 1 : bench.count + 1].mean(1, keepdim=True)
            soft = torch.sigmoid((scores - edge) / rule.soft)
            keep = keep.detach() + soft - soft.detach()
        return damage(keep)
    noisy = strongest(-scores.detach(), bench.count).float()
    if rule.tries == "random":
        noisy = (rng.stream("patches").permutation(bench.patches) < bench.count).float()
    strength = rng.stream("strength").uniform(1) if rule.strength == "random" else torch.ones(1)
    tried = (1 - strength * noisy).requires_grad_()
    (slope,) = torch.autograd.grad(damage(tried), tried)
    credit = slope * noisy
    return (scores * noisy * (credit - credit.sum() / noisy.sum())).sum()


def learned(bench: Bench, rule: Rule) -> CorruptionModel:
    selector = CorruptionModel(*bench.grid, bench.side, 3, torch.Generator().manual_seed(rule.seed))
    weights: list[nn.Parameter] = list(selector.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.mul_(rule.start)
    options = {"momentum": 0.9, "weight_decay": 0.05, "nesterov": True, "maximize": True}
    optimizer, order = torch.optim.SGD(weights, rule.rate, **options), torch.Generator().manual_seed(1)
    with frozen(bench.model), torch.enable_grad():
        for step in range(STEPS):
            x = bench.images[torch.randint(TRAINED, (BATCH,), generator=order)]
            rng = SampleRNG.of_samples(rule.seed, range(BATCH)).stream("learn", step)
            noise = uniform_noise(bench.model, x, rng)
            with torch.no_grad():
                clean = bench.features(x)

            def damage(keep: Tensor, x: Tensor = x, noise: Tensor = noise, clean: list[Tensor] = clean) -> Tensor:
                return distance(bench.features(corrupted(x, keep, noise, bench.side)), clean).mean()

            value = ascended(bench, rule, selector(normalize_like(bench.model, x)), rng, damage)
            slopes = torch.autograd.grad(value, weights)
            length = torch.linalg.vector_norm(torch.cat([slope.flatten() for slope in slopes]))
            for weight, slope in zip(weights, slopes, strict=True):
                weight.grad = slope if rule.length is None else slope * (rule.length / length)
            optimizer.step()
    return selector.requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--rules", nargs="+", choices=("perfect", *RULES), default=["perfect", *RULES])
    given = parser.parse_args()
    bench = Bench(given.model, given.data)
    for name in given.rules:
        if name == "perfect":
            print(f"{name}: {bench.gain(bench.perfect())}", flush=True)
            continue
        selector = learned(bench, RULES[name])
        keep = (~strongest(-selector(normalize_like(bench.model, bench.probe)), bench.count)).float()
        print(f"{name}: {bench.gain(keep)}", flush=True)


if __name__ == "__main__":
    main()
