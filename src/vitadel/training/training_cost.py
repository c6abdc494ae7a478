"""What a training will cost before it runs: its parts timed on a few images, on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from vitadel.training.inner_attack import run_inner_attack
from vitadel.training.interfaces import HasOwnMetric
from vitadel.training.recipes.build import Recipe
from vitadel.training.run import TrainingSetup, make_optimizer

_IMAGES = 32


def plan_training(setup: TrainingSetup, processes: Processes) -> dict[str, Any]:
    """Seconds for each part of the work, on this number of processes; plug-ins that add passes are not timed."""
    recipe, device = setup.recipe, processes.device
    model = recipe.adapter.attach(setup.model.to(device)).to(device)
    shown = recipe.adapter.shown(model)
    start = time.perf_counter()
    part = next(setup.stream.steps(0, 1))[0].to(device)
    reading = (time.perf_counter() - start) / len(part.y)
    x, y = part.x[:_IMAGES], part.y[:_IMAGES]
    half = PRECISIONS[recipe.train.amp_dtype]

    def in_half(kind: torch.dtype | None) -> AbstractContextManager[object]:
        return nullcontext() if kind is None else torch.autocast(device.type, kind)

    def learn() -> Tensor:
        with in_half(half):
            loss = recipe.objective(model.train(), x, x, y)["loss"]
        loss.backward()
        return loss

    def measured(work: Callable[[], Tensor]) -> float:
        return seconds_of(work, device) / len(y)

    def attack_once() -> Tensor:
        assert at_work is not None
        with in_half(half if half == torch.bfloat16 else None):  # fp16 is for the loss only, as in the loop
            return run_inner_attack(at_work, shown, x, y, mode=recipe.train.attack_mode)

    attack = recipe.objective.attack
    at_work = None if attack is None else training_form(attack)
    with fastest_attention(model, device, half):
        learning = measured(learn)
        updating = seconds_of(_update(recipe, model), device)
        model.zero_grad(set_to_none=True)
        attacking = 0.0 if at_work is None else measured(attack_once)
    times = PassTimes.measure(model, x)
    threat = recipe.threat

    def at_most(name: str) -> float:
        gradients, forwards = make(name, eps=threat.eps, norm=threat.norm).passes()
        return times.seconds(gradients, forwards + 1)

    def validating() -> float:
        objective = recipe.objective
        if isinstance(objective, HasOwnMetric) and attack is not None:  # by its own measure, under its own attack
            with frozen(model), torch.no_grad():
                return attacking + measured(lambda: objective.measure(model, x, x)[0])
        return times.forward + (at_most(recipe.validation.attack) if recipe.validation.attack else 0.0)

    epochs = recipe.train.epochs + recipe.schedule.cooldown_epochs
    steps = setup.stream.steps_per_epoch * epochs
    images = steps * recipe.train.batch_size / processes.count
    validated = len(setup.held_out.rows) * (-(-epochs // recipe.validation.every)) / processes.count
    test = 0 if setup.test is None else len(setup.test)
    audited = min(recipe.audit.limit or test, test) / processes.count
    parts: list[tuple[str, float, float]] = [  # what, images, seconds an image
        ("reading and augmentation", images, reading),
        ("attacks", images, attacking),
        ("loss and gradients", images, learning),
        ("update", steps * recipe.train.batch_size, updating / recipe.train.batch_size),
        ("validation, at most", validated, validating()),
        ("audit at the end, at most", audited, times.forward + sum(map(at_most, recipe.audit.attacks))),
    ]
    return {
        "epochs": epochs,
        "steps": steps,
        "batch_size": recipe.train.batch_size,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "processes": processes.count,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plugins_not_timed": [name for name, _ in recipe.plugins],
        "rows": [{"name": name, "images": count, "seconds": count * each} for name, count, each in parts],
        "seconds": sum(count * each for _, count, each in parts),
    }


def _update(recipe: Recipe, model: nn.Module) -> Callable[[], Tensor]:
    """A step of the optimizer at a rate of 0: nearly all leave the weights where they are."""
    optimizer = make_optimizer(recipe.optimizer, model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    some = next(parameter for parameter in model.parameters() if parameter.requires_grad)

    def step() -> Tensor:
        optimizer.step()
        return some

    return step
