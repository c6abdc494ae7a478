"""Attention random dropping and perturbation random masking (Mo et al., NeurIPS 2022, arXiv:2210.07540)."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from vitadel.attacks.pgd import PGD
from vitadel.backbones.anatomy import attentions_of, blocks_of
from vitadel.backbones.classifier import Classifier
from vitadel.errors import UserError
from vitadel.instrument.hooks import Edge, hooked
from vitadel.instrument.patch_grid import patch_grid
from vitadel.runtime.rng import SampleRNG
from vitadel.training.protocols import Objective, Training
from vitadel.types import Aim, Attack, Goal, Step, Stepper, Threat

__all__ = ["RandomDropping"]

# No branches: all that the head learns of the patches (class attention) or all that goes on (LeViT's stages) comes
# through them, so that without their gradients there would be none at all.
_ONLY_WAYS = ("ClassAttn", "AttentionDownsample")


@dataclass
class RandomDropping:
    """The training attack begins weak and becomes plain PGD over the first `epochs`, growing with every step.

    With keeping probability r = min(t / epochs, 1), t the epochs done so far, as a fraction: `attention` lets gradients
    pass the attention branch of each block with probability r only, drawn anew for every step of the attack; `patches`
    takes the perturbation off a share 1 - r of the patches, drawn anew, before every step of the attack, which then
    moves all patches. Both are the same for all images. Neither changes how the model computes, nor its training.
    """

    epochs: float = 10
    attention: bool = True
    patches: bool = True
    _grid: tuple[int, int] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.epochs < math.inf:
            raise UserError(f"random dropping needs a positive number of epochs, got {self.epochs:g}")

    def length_warning(self, epochs: int) -> str | None:
        short = self.epochs >= epochs
        return f"lasts {self.epochs:g} epochs, and there are {epochs}: the attack never gets full" if short else None

    def check_objective(self, objective: Objective, threat: Threat) -> None:
        if objective.attack is None:
            raise UserError("this objective makes no attack that could begin weak; leave random_dropping out")
        _as_pgd(objective.attack)

    def check_model(self, model: Classifier) -> None:
        if self.attention:
            _branches(model)

    def change_attack(self, run: Training, attack: Attack) -> Attack:
        keep = min(run.step / run.steps_per_epoch / self.epochs, 1.0)
        run.log({"kept": keep})
        attack = _as_pgd(attack)
        if keep == 1:
            return attack
        dropping = _Dropping(SampleRNG.of_samples(run.seed, [run.step]).stream("random dropping"), keep, attack.steps)
        goal = _through_fewer(attack.goal, dropping) if self.attention else attack.goal
        if not self.patches:
            return replace(attack, goal=goal)
        reset = _Reset(dropping, self._patches_of(run))
        goal, stepper = _from_reset(goal, reset), _StepsFromReset(attack.stepper, reset)
        # What fools the model after a reset need not fool it before: the search goes on to its end.
        return replace(attack, goal=goal, stepper=stepper, stop_when_fooled=False)

    def _patches_of(self, run: Training) -> tuple[int, int]:
        if self._grid is None:
            x, _ = next(iter(run.training_images(1)))
            self._grid = patch_grid(run.model, x)
        return self._grid


def _as_pgd(attack: Attack) -> PGD:
    if not isinstance(attack, PGD):
        raise UserError(
            f"random dropping changes the steps of PGD, and the training attack is {type(attack).__name__}; "
            "give the objective an attack such as pgd-10, without prefixes and restarts"
        )
    return attack


@dataclass(frozen=True)
class _Dropping:
    """One training step's draws; a turn is a step of the attack."""

    rng: SampleRNG
    keep: float
    steps: int

    def turn(self, progress: float) -> int:
        return round(progress * self.steps)

    def kept(self, turn: int, count: int) -> list[bool]:
        return (self.rng.stream("attention", turn).uniform(count)[0] < self.keep).tolist()

    def left_out(self, turn: int, count: int) -> Tensor:
        """Which of so many patches lose their perturbation."""
        order = self.rng.stream("patches", turn).permutation(count)[0]
        return torch.zeros(count, dtype=torch.bool).scatter(0, order[: int(count * (1 - self.keep))], True)


@dataclass(frozen=True)
class _Seen:
    """A goal whose aim is seen in another way, told by the model and the clean images."""

    goal: Goal
    another_way: Callable[[Aim, nn.Module, Tensor], Aim]

    @property
    def forwards(self) -> int:
        return self.goal.forwards

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return self.another_way(self.goal(model, x, y), model, x)


def _through_fewer(goal: Goal, dropping: _Dropping) -> Goal:
    return _Seen(goal, lambda aim, model, _x: _FewerAim(aim, model, dropping))


def _from_reset(goal: Goal, reset: _Reset) -> Goal:
    return _Seen(goal, lambda aim, _model, x: _ResetAim(aim, x, reset))


@dataclass(frozen=True)
class _FewerAim:
    """Gradients pass through some of the attention branches only."""

    aim: Aim
    model: nn.Module
    dropping: _Dropping

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        with self._dropped(self.dropping.turn(progress)):
            return self.aim.evaluate(z, progress)

    def _dropped(self, turn: int) -> AbstractContextManager[None]:
        branches = _branches(self.model)
        kept = self.dropping.kept(turn, len(branches))
        return hooked(
            self.model,
            [
                Edge(name, module, Tensor.detach)
                for (name, module), keep in zip(branches, kept, strict=True)
                if not keep
            ],
        )

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, aim=self.aim.keep(chosen))


def _branches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules of blocks that signals can also go around."""
    blocks = [block.name for block in blocks_of(model)]
    branches = []
    for attention in attentions_of(model):
        kind = type(attention.module).__name__
        if attention.name in blocks:
            raise UserError(
                f"{kind} computes attention and MLP at once, so gradients cannot be kept from the attention alone: "
                "set attention to false in random_dropping, or train another model"
            )
        if kind not in _ONLY_WAYS and any(attention.name.startswith(f"{block}.") for block in blocks):
            branches.append((attention.name, attention.module))
    return branches


@dataclass(frozen=True)
class _Reset:
    """Takes the perturbation off some patches."""

    dropping: _Dropping
    grid: tuple[int, int]

    def __call__(self, z: Tensor, x: Tensor, turn: int) -> Tensor:
        rows, columns = self.grid
        chosen = self.dropping.left_out(turn, rows * columns).to(z.device).view(rows, columns)
        height, width = z.shape[-2:]
        row = torch.arange(height, device=z.device) * rows // height
        column = torch.arange(width, device=z.device) * columns // width
        return torch.where(chosen[row][:, column], x, z)


@dataclass(frozen=True)
class _ResetAim:
    """Looked at after the reset."""

    aim: Aim
    x: Tensor
    reset: _Reset

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        here = self.reset(z.detach(), self.x, self.reset.dropping.turn(progress))
        # The value at the reset point, and its gradient in all patches: the last term is zero but for its slope.
        return self.aim.evaluate(here + (z - z.detach()), progress)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, aim=self.aim.keep(chosen), x=self.x[chosen])


@dataclass(frozen=True)
class _StepsFromReset:
    """A stepper that leaves from where the goal was looked at."""

    stepper: Stepper
    reset: _Reset

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step:
        return _StepFromReset(self.stepper.start(threat, steps, x), x, self.reset)


@dataclass(frozen=True)
class _StepFromReset:
    step: Step
    x: Tensor
    reset: _Reset

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        return self.step.move(self.reset(z, self.x, turn), grad, turn)

    def keep(self, chosen: Tensor) -> Step:
        return replace(self, step=self.step.keep(chosen), x=self.x[chosen])
