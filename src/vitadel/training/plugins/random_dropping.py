"""Attention random dropping and perturbation random masking (Mo et al., NeurIPS 2022, arXiv:2210.07540)."""

from __future__ import annotations

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
from vitadel.instrument.tokens import patch_grid
from vitadel.quantities import POSITIVE, check_ranges
from vitadel.runtime.rng import SampleRNG
from vitadel.training.interfaces import Objective, Training
from vitadel.types import Aim, Attack, Goal, Step, Stepper, Threat

# Without a residual connection around them: dropping their gradients would leave no gradient at all (class attention,
# the stages of LeViT).
_NOT_RESIDUAL = ("ClassAttn", "AttentionDownsample")


@dataclass
class RandomDropping:
    """Weakens the training attack at first; it becomes plain PGD over the first `epochs`.

    With r = min(t / epochs, 1), t the (fractional) epochs done so far: `attention` keeps the gradient of each block's
    attention branch with probability r, drawn for every attack step; `patches` resets the perturbation of a share 1 - r
    of the patches, drawn for every attack step, before the step moves all patches. Both are the same for all images and
    change neither the model's outputs nor its training.
    """

    epochs: float = 10
    attention: bool = True
    patches: bool = True
    _grid: tuple[int, int] | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        check_ranges(self, epochs=POSITIVE)

    def length_warning(self, epochs: int) -> str | None:
        short = self.epochs >= epochs
        return f"takes {self.epochs:g} of {epochs} epochs: the full attack is never reached" if short else None

    def check_objective(self, objective: Objective, threat: Threat) -> None:
        if objective.attack is None:
            raise UserError("this objective has no attack to weaken; remove random_dropping")
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
        goal = _dropping_goal(attack.goal, dropping) if self.attention else attack.goal
        if not self.patches:
            return replace(attack, goal=goal)
        reset = _Reset(dropping, self._patches_of(run))
        goal, stepper = _reset_goal(goal, reset), _StepsFromReset(attack.stepper, reset)
        # An image that is misclassified after a reset need not be misclassified before: do not stop early.
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
    """Random choices of one training step; a turn is a step of the attack."""

    rng: SampleRNG
    keep: float
    steps: int

    def turn(self, progress: float) -> int:
        return round(progress * self.steps)

    def kept_branches(self, turn: int, count: int) -> list[bool]:
        return (self.rng.stream("attention", turn).uniform(count)[0] < self.keep).tolist()

    def reset_patches(self, turn: int, count: int) -> Tensor:
        """Which of `count` patches lose their perturbation."""
        order = self.rng.stream("patches", turn).permutation(count)[0]
        return torch.zeros(count, dtype=torch.bool).scatter(0, order[: int(count * (1 - self.keep))], True)


@dataclass(frozen=True)
class _WrappedGoal:
    """A goal whose aim is wrapped, given the model and the clean images."""

    goal: Goal
    wrap: Callable[[Aim, nn.Module, Tensor], Aim]

    @property
    def forwards(self) -> int:
        return self.goal.forwards

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim:
        return self.wrap(self.goal(model, x, y), model, x)


def _dropping_goal(goal: Goal, dropping: _Dropping) -> Goal:
    return _WrappedGoal(goal, lambda aim, model, _x: _DroppedAim(aim, model, dropping))


def _reset_goal(goal: Goal, reset: _Reset) -> Goal:
    return _WrappedGoal(goal, lambda aim, _model, x: _ResetAim(aim, x, reset))


@dataclass(frozen=True)
class _DroppedAim:
    """An aim whose gradients pass through some of the attention branches only."""

    aim: Aim
    model: nn.Module
    dropping: _Dropping

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        with self._dropped(self.dropping.turn(progress)):
            return self.aim.evaluate(z, progress)

    def _dropped(self, turn: int) -> AbstractContextManager[None]:
        branches = _branches(self.model)
        kept = self.dropping.kept_branches(turn, len(branches))
        detached = [branch for branch, keep in zip(branches, kept, strict=True) if not keep]
        return hooked(self.model, [Edge(name, module, Tensor.detach) for name, module in detached])

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, aim=self.aim.keep(chosen))


def _branches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Attention modules with a residual connection around them."""
    blocks = [block.name for block in blocks_of(model)]
    branches = []
    for attention in attentions_of(model):
        kind = type(attention.module).__name__
        if attention.name in blocks:
            raise UserError(
                f"{kind} computes attention and MLP at once, so gradients cannot be kept from the attention alone: "
                "set attention to false in random_dropping, or train another model"
            )
        if kind not in _NOT_RESIDUAL and any(attention.name.startswith(f"{block}.") for block in blocks):
            branches.append((attention.name, attention.module))
    return branches


@dataclass(frozen=True)
class _Reset:
    """Resets some patches to the clean image."""

    dropping: _Dropping
    grid: tuple[int, int]

    def __call__(self, z: Tensor, x: Tensor, turn: int) -> Tensor:
        rows, columns = self.grid
        chosen = self.dropping.reset_patches(turn, rows * columns).to(z.device).view(rows, columns)
        height, width = z.shape[-2:]
        row = torch.arange(height, device=z.device) * rows // height
        column = torch.arange(width, device=z.device) * columns // width
        return torch.where(chosen[row][:, column], x, z)


@dataclass(frozen=True)
class _ResetAim:
    """An aim evaluated after the reset."""

    aim: Aim
    x: Tensor
    reset: _Reset

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        here = self.reset(z.detach(), self.x, self.reset.dropping.turn(progress))
        # The value after the reset, with gradients in all patches: the last term is zero except for its gradient.
        return self.aim.evaluate(here + (z - z.detach()), progress)

    def keep(self, chosen: Tensor) -> Aim:
        return replace(self, aim=self.aim.keep(chosen), x=self.x[chosen])


@dataclass(frozen=True)
class _StepsFromReset:
    """A stepper that starts from the point after the reset."""

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
