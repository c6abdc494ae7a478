"""What a training will cost before it runs: its parts timed on a few images, on this machine, and its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.attacks.settings import training_form
from vitadel.backbones.classifier import fastest_attention
from vitadel.evaluation.engine.cost import PassTimes, seconds_of
from vitadel.evaluation.engine.stages import PRECISIONS
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.training.interfaces import HasOwnMetric
from vitadel.training.loop import make_optimizer, run_inner_attack
from vitadel.training.recipes.build import Recipe
from vitadel.training.run import TrainingSetup
from vitadel.training.training_memory import plan_memory

_IMAGES = 32
_SUMMED = {"seconds_likely": "likely_seconds", "seconds": "seconds"}
_ROBUST = 0.5
"""Assumed share of images that withstand attacks on the trained model, and so cost the most: unknown before."""


def plan_training(
    setup: TrainingSetup, processes: Processes, report: Callable[[str], None] = lambda part: None
) -> dict[str, Any]:
    """Seconds for each part of the work, on this number of processes; plug-ins that add passes are not timed.

    `report` receives the name of each part before it is timed.
    """
    recipe, device = setup.recipe, processes.device
    model = processes.place(recipe.adapter.attach(setup.model.to(processes.model_device or device)))
    shown = recipe.adapter.shown(model)
    report("reading and augmentation")
    start = time.perf_counter()
    part = next(setup.stream.steps(0, 1))[0].to(device)
    reading = (time.perf_counter() - start) / len(part.y)
    x, y = part.x[:_IMAGES], part.y[:_IMAGES]
    half = PRECISIONS[recipe.train.amp_dtype]

    def learn(x: Tensor = x, y: Tensor = y) -> Tensor:
        with _in_half(half, device):
            loss = recipe.objective(model.train(), x, x, y)["loss"]
        loss.backward()
        return loss

    def measured(work: Callable[[], Tensor]) -> float:
        return seconds_of(work, device) / len(y)

    def attack_once(x: Tensor = x, y: Tensor = y) -> Tensor:
        assert at_work is not None
        with _in_half(half if half == torch.bfloat16 else None, device):  # fp16 is for the loss only, as in the loop
            return run_inner_attack(at_work, shown, x, y, mode=recipe.train.attack_mode)

    def parts_of_step(x: Tensor, y: Tensor) -> list[Callable[[], object]]:
        return [lambda: learn(x, y), *([] if at_work is None else [lambda: attack_once(x, y)])]

    attack = recipe.objective.attack
    at_work = None if attack is None else training_form(attack)
    with fastest_attention(model, device, half):
        report("loss and gradients")
        learning = measured(learn)
        optimizer = _idle_optimizer(recipe, model)
        updating = seconds_of(lambda: _step(optimizer), device)
        report("memory")
        memory = plan_memory(recipe, model, optimizer, parts_of_step, (x, y), processes.count)
        model.zero_grad(set_to_none=True)
        report("attacks")
        attacking = 0.0 if at_work is None else measured(attack_once)
    report("validation and audit")
    times = PassTimes.measure(model, x)
    threat = recipe.threat

    def at_most(name: str) -> float:
        gradients, forwards = make(name, eps=threat.eps, norm=threat.norm).passes()
        return times.seconds(gradients, forwards + 1)

    def validating() -> float:
        objective = recipe.objective
        if isinstance(objective, HasOwnMetric) and attack is not None:  # its own measure, under its own attack
            with frozen(model), torch.no_grad():
                return attacking + measured(lambda: objective.measure(model, x, x)[0])
        return times.forward + (at_most(recipe.validation.attack) if recipe.validation.attack else 0.0)

    amounts = _Amounts.of(setup, processes)
    parts: list[tuple[str, float, float]] = [  # what, images, seconds an image
        ("reading and augmentation", amounts.images, reading),
        ("attacks", amounts.images, attacking),
        ("loss and gradients", amounts.images, learning),
        ("update", amounts.steps * recipe.train.batch_size, updating / recipe.train.batch_size),
        ("validation, at most", amounts.validated, validating()),
        ("audit at the end, at most", amounts.audited, times.forward + sum(map(at_most, recipe.audit.attacks))),
    ]
    return {
        "epochs": amounts.epochs,
        "steps": amounts.steps,
        "batch_size": recipe.train.batch_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plugins_not_timed": [name for name, _ in recipe.plugins],
        **_machine(processes),
        **_sums(parts),
        "memory": memory,
    }


@dataclass(frozen=True)
class _Amounts:
    """How much a training does; images are those of one process."""

    epochs: int
    steps: int
    images: float
    validated: float
    audited: float

    @classmethod
    def of(cls, setup: TrainingSetup, processes: Processes) -> _Amounts:
        recipe, count = setup.recipe, processes.count
        epochs = recipe.train.epochs + recipe.schedule.cooldown_epochs
        steps = setup.stream.steps_per_epoch * epochs
        validated = len(setup.held_out.rows) * (-(-epochs // recipe.validation.every)) / count
        test = 0 if setup.test is None else len(setup.test)
        audited = min(recipe.audit.limit or test, test) / count
        return cls(epochs, steps, steps * recipe.train.batch_size / count, validated, audited)


def _in_half(kind: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    return nullcontext() if kind is None else torch.autocast(device.type, kind)


def _sums(parts: list[tuple[str, float, float]]) -> dict[str, Any]:
    rows = [_row(*part) for part in parts]
    sums = {key: sum(row[name] for row in rows) for key, name in _SUMMED.items()}
    return {"rows": rows, **sums}


def _machine(processes: Processes) -> dict[str, Any]:
    return {"device": str(processes.device), "threads": torch.get_num_threads(), "processes": processes.count}


def _row(name: str, images: float, each: float) -> dict[str, Any]:
    robust = _ROBUST if name.endswith("at most") else 1.0
    return {"name": name, "images": images, "likely_seconds": robust * images * each, "seconds": images * each}


def _idle_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer at a rate of 0, at which nearly all leave the weights where they are."""
    optimizer = make_optimizer(recipe.optimizer, model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def _step(optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.step()
    some: Tensor = optimizer.param_groups[0]["params"][0]
    return some
