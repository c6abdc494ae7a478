"""Shared by the benchmarks of training: single steps of our loop, and candidates that take turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.backbones.load import load_model
from vitadel.runtime.distributed import Processes

# Single steps have no public name: `train` runs all of them at once, so candidates could not take turns.
from vitadel.training.loop import _Trainer, make_optimizer
from vitadel.training.metrics import Metrics, ProgressTable
from vitadel.training.recipes.build import Recipe
from vitadel.training.run import _PRECISIONS, open_training
from vitadel.training.training_state import TrainingState

__all__ = ["Step", "opened", "our_step", "ratios_to", "take_turns"]

Step = Callable[[], None]


def opened(name: str) -> Classifier:
    """A model of the zoo, or one of timm's with random weights: a step costs the same."""
    torch.manual_seed(0)
    return load_model(name) if name.startswith("zoo:") else load_model(name, weights="random")


def our_step(recipe: Recipe, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """One optimizer step of `vitadel harden` on the given images, without reading any, on their device."""
    processes = Processes(0, 1, x.device)
    setup = open_training(recipe, processes)
    recipe, on_cpu = setup.recipe, x.device.type == "cpu"
    AcceleratorState._reset_state()  # or a second step in this process could not have another precision
    precision = _PRECISIONS[recipe.train.amp_dtype]
    accelerator = Accelerator(cpu=on_cpu, mixed_precision=precision, device_placement=False)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(recipe.optimizer, model))
    board, folder = ProgressTable(10**6, 1, shown=False), Path(tempfile.mkdtemp())
    run = TrainingState(recipe, model, 10, setup.stream, setup.held_out, processes, folder, board, Metrics(None))
    learner = _Trainer(run, prepared, optimizer, accelerator, asked=lambda: False, fetch=lambda: None)
    (part,) = next(setup.stream.steps(0, 1))
    part = type(part)(part.names, x, y)
    return lambda: learner.take_step([part])


def take_turns(
    candidates: Mapping[str, Step], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds of every round, after one warm-up step each; the order rotates, so that drift affects all candidates."""
    for step in candidates.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(rounds):
        begin = turn % len(names)
        for name in names[begin:] + names[:begin]:
            started = clock()
            candidates[name]()
            seconds[name].append(clock() - started)
    return seconds


def ratios_to(floor: str, seconds: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Every candidate's time as a multiple of the floor's in the same round."""
    return {name: [a / b for a, b in zip(each, seconds[floor], strict=True)] for name, each in seconds.items()}
