"""What one step of training TORA-ViT costs beside fine-tuning the whole model, in time and in memory, in one run.

    python benchmarks/tora_training.py                     # the tiny ViT of the zoo, and DeiT-Ti with random weights
    python benchmarks/tora_training.py --models deit_tiny_patch16_224 --batch 8 --rounds 9 --out runs/tora-cost

All are steps of our own loop on the same images, with the same optimizer and attack steps; the reference is adversarial
training of all weights. TORA's losses need a clean and an attacked pass, adversarial training only the latter, so
TRADES on all weights stands beside it, which needs both, too. Contenders take turns and are compared within their
round; time is that of this process on the processor, so that other jobs on the machine count little.

Memory is counted, not sampled, and so is the same on every machine: the peak of what autograd holds for backward passes
(every storage once, parameters not), during attack and loss; and weights, gradients and the two moments of AdamW, of
which only weights are there for what is frozen.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from stepping import Step, opened, our_step, ratios_to, take_turns
from torch import Tensor, nn

from vitadel.adapters.tora.tora_files import save_tora
from vitadel.adapters.tora.tora_vit import Tora
from vitadel.evaluation.engine.run import environment
from vitadel.runtime.run_folder import write_json
from vitadel.training.recipes.build import build_recipe
from vitadel.training.recipes.compose import compose

MODELS = ("zoo:shapes-standard", "deit_tiny_patch16_224")
WHOLE = "all weights, PGD-AT"
_OF_ADAMW = 3  # times the size of what is trained: its gradient and two moments


@dataclass
class Held:
    """Bytes that autograd holds for backward passes, now and at most; parameters are held anyway."""

    own: frozenset[int]
    now: int = 0
    peak: int = 0
    holders: Counter[int] = field(default_factory=Counter)

    def take(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def count(self, place: int, size: int, change: int) -> None:
        """One holder more or less of a storage; only the first and the last matter."""
        before = self.holders[place]
        self.holders[place] += change
        if before == 0 or self.holders[place] == 0:
            self.now += change * size
            self.peak = max(self.peak, self.now)


class _Saved:
    """A tensor that autograd keeps; when it lets go of it, so does the count."""

    def __init__(self, tensor: Tensor, held: Held) -> None:
        storage = tensor.untyped_storage()
        self.tensor, self.held = tensor, held
        self.place, self.size = storage.data_ptr(), storage.nbytes()
        self.counts = self.place not in held.own
        if self.counts:
            held.count(self.place, self.size, 1)

    def __del__(self) -> None:
        if self.counts:
            self.held.count(self.place, self.size, -1)


@contextmanager
def watched(model: nn.Module) -> Iterator[Held]:
    """What autograd holds while a step runs."""
    held = Held(frozenset(each.untyped_storage().data_ptr() for each in model.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(held.take, lambda saved: saved.tensor):
        yield held


@dataclass(frozen=True, eq=False)
class Candidate:
    model: nn.Module
    step: Step

    def memory(self) -> dict[str, int]:
        """In bytes."""
        with watched(self.model) as held:
            self.step()
        sizes = [(each.numel() * each.element_size(), each.requires_grad) for each in self.model.parameters()]
        trained = sum(size for size, learns in sizes if learns)
        weights = sum(size for size, _ in sizes)
        return {"activations": held.peak, "weights and optimizer": weights + _OF_ADAMW * trained, "trained": trained}


def candidates(name: str, x: Tensor, y: Tensor, steps: int) -> dict[str, Candidate]:
    """The whole model in two ways, TORA's two phases, and the baseline with one adapter."""

    def one(changes: Mapping[str, Any]) -> Candidate:
        shared = {"train.batch_size": len(y), "train.tracker": "none"}
        document = compose("tora/shapes", "tora", shared)
        document = {**document, "objective": {"use": "tora", "attack": f"pgd-{steps}"}, **changes}
        recipe = build_recipe(document, "benchmark")
        model = recipe.adapter.attach(opened(name))
        return Candidate(model, our_step(recipe, model, x, y))

    whole = {"adapter": {"use": "whole_model"}}
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder) / "phase-1.safetensors"
        save_tora(Tora(opened(name)), parts)
        return {
            WHOLE: one({**whole, "objective": {"use": "adversarial", "attack": f"pgd-{steps}"}}),
            "all weights, TRADES": one({**whole, "objective": {"use": "trades", "attack": f"kl-{steps}"}}),
            "TORA, phase 1": one({"adapter": {"use": "tora"}}),
            "TORA, phase 2": one({"adapter": {"use": "tora", "start": str(parts), "trade_off": 0.5}}),
            "one adapter": one({"adapter": {"use": "tora", "kind": "single", "trade_off": 0.5}}),
        }


def measure(name: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Seconds of every round, and bytes, of every contender."""
    size = opened(name).record.input_size or (32, 32)
    classes = opened(name).record.num_classes or 10
    x, y = torch.rand(batch, 3, *size), torch.arange(batch) % min(classes, 10)
    crew = candidates(name, x, y, steps)
    seconds = take_turns({who: each.step for who, each in crew.items()}, rounds, time.process_time)
    return {"seconds": seconds, "bytes": {who: each.memory() for who, each in crew.items()}}


def table(name: str, found: Mapping[str, Any], title: str) -> Table:
    """Ratios to adversarial training of all weights."""
    table = Table(title=f"{name}: {title}", title_justify="left")
    for heading in ("", "time, ratio", "quartiles", "activations, ratio", "weights and optimizer, ratio", "trained"):
        table.add_column(heading, justify="left" if heading in ("", "quartiles") else "right")
    reference = found["bytes"][WHOLE]
    for who, ratios in ratios_to(WHOLE, found["seconds"]).items():
        low, _, high = quantiles(ratios, n=4)
        here = found["bytes"][who]
        shares = [f"{here[each] / reference[each]:.2f}" for each in ("activations", "weights and optimizer")]
        trained = f"{here['trained'] / reference['trained']:.1%}"
        table.add_row(who, f"{median(ratios):.2f}", f"{low:.2f} to {high:.2f}", *shares, trained)
    table.caption = (
        f"1 = {median(found['seconds'][WHOLE]):.3f} s, {reference['activations'] / 2**20:.1f} MiB and "
        f"{reference['weights and optimizer'] / 2**20:.1f} MiB"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write seconds and bytes there as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title = f"one step, {options.steps} attack steps, batch {options.batch}, {options.rounds} rounds"
    results = {}
    for name in options.models:
        results[name] = measure(name, options.batch, options.steps, options.rounds)
        Console().print(table(name, results[name], title))
    if options.out:
        asked = {key: str(value) for key, value in vars(options).items()}
        machine = environment(torch.device("cpu"), options.threads)
        write_json(options.out / "tora_training.json", {"options": asked, "environment": machine, "found": results})


if __name__ == "__main__":
    main()
