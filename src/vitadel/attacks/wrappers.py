"""Attacks around attacks: restarts, the worst of several, averages over randomness, and target classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from vitadel.attacks.goals import View, deployed, deployed_fooled, seen_through
from vitadel.attacks.losses import check_classes, likeliest_wrong
from vitadel.attacks.per_sample import SampleInfo, images_and_info_of, images_of, merge_info, run_attack
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

MEMBER = "member"
"""The random stream of each member of an ensemble, together with its number."""


def not_fooled(model: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    """The places of the images that the deployed model still classifies correctly."""
    with frozen(model):
        return (~deployed_fooled(model, z, y)).nonzero().squeeze(1)


def _run_in_turn(
    attacks: Sequence[tuple[Attack, str, int]],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rng: SampleRNG,
    with_info: bool,
) -> tuple[Tensor, SampleInfo]:
    """Run each (attack, random stream, number) on the samples that the earlier ones did not fool."""
    found, info = x.detach().clone(), SampleInfo()
    place = torch.arange(len(x), device=x.device)
    for position, (attack, stream, number) in enumerate(attacks):
        z, new = run_attack(attack, model, x[place], y[place], rng[place].stream(stream, number), with_info)
        found[place] = z
        merge_info(info, new, place, len(x))
        if position + 1 < len(attacks):  # the judge decides whether the last one succeeded
            place = place[not_fooled(model, z, y[place])]
        if len(place) == 0:
            break
    return found, info


@dataclass(frozen=True)
class Restarts:
    """Repeat an attack, with new random numbers, on the samples that it has not fooled yet."""

    attack: Attack
    times: int

    def __post_init__(self) -> None:
        if self.times < 1:
            raise UserError(f"restarts must be at least 1, got {self.times}")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """With the info of each sample's last run."""
        runs = [(self.attack, "restart", number) for number in range(self.times)]
        return _run_in_turn(runs, model, x, y, rng, with_info)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients * self.times, forwards * self.times + self.times - 1


def with_restarts(attack: Attack, restarts: int) -> Attack:
    """The attack inside `Restarts`, or the attack itself if it runs once."""
    return attack if restarts == 1 else Restarts(attack, restarts)


@dataclass(frozen=True)
class WorstOf:
    """Several attacks, each on the samples that the earlier ones did not fool: the worst case per sample.

    `names` are the members' names in results; `audit` runs the members as separate stages with the same random numbers.
    """

    attacks: tuple[Attack, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.attacks:
            raise UserError("a worst case needs at least one attack")
        if self.names and len(self.names) != len(self.attacks):
            raise UserError(f"{len(self.attacks)} attacks need as many names, got {len(self.names)}")

    @classmethod
    def named(cls, attacks: Mapping[str, Attack]) -> WorstOf:
        return cls(tuple(attacks.values()), tuple(attacks))

    def members(self) -> list[tuple[str, Attack]]:
        names = self.names or tuple(str(number) for number in range(len(self.attacks)))
        return list(zip(names, self.attacks, strict=True))

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        """With the info of the last member that ran on each sample."""
        runs = [(attack, MEMBER, number) for number, attack in enumerate(self.attacks)]
        return _run_in_turn(runs, model, x, y, rng, with_info)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = zip(*(attack.passes() for attack in self.attacks), strict=True)
        return sum(gradients), sum(forwards) + len(self.attacks) - 1


@dataclass(frozen=True)
class Stage:
    """One attack of a staged ensemble, on the samples at `places` of the run, with a random `stream` of its own.

    `variant` tells attacks of the same name apart whose settings follow from the samples.
    """

    name: str
    attack: Attack
    places: Tensor
    stream: tuple[str, int] | None = None
    variant: str = ""

    def own(self, rng: SampleRNG) -> SampleRNG:
        return rng if self.stream is None else rng.stream(*self.stream)


@dataclass(frozen=True)
class StageResult:
    """The samples of a stage, which of them were fooled, and the sample info about them; all on the CPU."""

    samples: Tensor
    fooled: Tensor
    info: SampleInfo


Stages = Generator[Stage, StageResult, None]


@runtime_checkable
class Staged(Protocol):
    """An ensemble that chooses its next attack, and the samples to run it on, by the results on all samples so far."""

    def stages(self, rng: SampleRNG) -> Stages:
        """Yield one stage after another, the first on all samples; `rng` has the streams of all samples of the run."""
        ...


def next_stage(stages: Stages, result: StageResult | None) -> Stage | None:
    """The stage that follows from the last one's result, None for the first; None after the last."""
    try:
        return next(stages) if result is None else stages.send(result)
    except StopIteration:
        return None


def mean_logits(model: nn.Module, x: Tensor, times: int) -> Tensor:
    """The mean logits of several passes; only the activations of one pass are in memory at a time."""

    def run_once() -> Tensor:
        recompute = torch.is_grad_enabled() and x.requires_grad
        logits: Tensor = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
        return logits

    with set_checkpoint_early_stop(False):
        return torch.stack([run_once() for _ in range(times)]).mean(0)


@dataclass(frozen=True)
class Averaged:
    """Expectation over transformation (Athalye et al. 2018, arXiv:1707.07397), for models with random outputs.

    Losses, gradients and verdicts come from the mean logits of `times` passes. Features and attention maps that the
    attack reads are those of the last pass.
    """

    attack: Attack
    times: int = 20

    def __post_init__(self) -> None:
        if self.times < 1:
            raise UserError(f"eot needs at least 1 pass to average, got {self.times}")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        mean = seen_through(model, partial(View, read=partial(mean_logits, times=self.times)))
        return run_attack(self.attack, mean, x, y, rng, with_info)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # The backward pass recomputes its forward pass instead of keeping the activations of all passes.
        return gradients * self.times, (forwards + gradients) * self.times


def _scaled_logits(model: nn.Module, x: Tensor, factor: float) -> Tensor:
    logits: Tensor = model(x)
    return logits * factor


@dataclass(frozen=True)
class ScaledLogits:
    """Multiply the logits by a positive factor while an attack searches (Jain & Dutta, CVPR 2024, figure 1b).

    Large logits saturate the softmax of the cross-entropy; the verdict does not depend on the factor.
    """

    attack: Attack
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise UserError(f"logits are scaled by a positive factor, got {self.factor}")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        view = seen_through(model, partial(View, read=partial(_scaled_logits, factor=self.factor)))
        return run_attack(self.attack, view, x, y, rng, with_info)

    def passes(self) -> tuple[int, int]:
        return self.attack.passes()


def _one_versus_rest(model: nn.Module, x: Tensor, target: int) -> Tensor:
    """Two logits: the best of all other classes, and the target's; `fooled` then means that the target is reached."""
    logits: Tensor = model(x)
    rest = logits.index_fill(1, torch.tensor([target], device=logits.device), -torch.inf).amax(1)
    return torch.stack([rest, logits[:, target]], dim=1)


_RULES: dict[str, Callable[[Tensor, SampleRNG], Tensor]] = {
    "next": lambda ranked, rng: ranked[:, 0],
    "least": lambda ranked, rng: ranked[:, -1],
    "random": lambda ranked, rng: _pick(ranked, rng.stream("target").uniform()),
}


def _pick(ranked: Tensor, uniform: Tensor) -> Tensor:
    place = (uniform * ranked.shape[1]).long().clamp(max=ranked.shape[1] - 1)
    return ranked.gather(1, place[:, None]).squeeze(1)


@dataclass(frozen=True)
class Targeted:
    """Run an attack towards a target class: one number for all samples, or one class per sample by a rule.

    `next` is the most likely wrong class of the clean image, `least` the least likely one, `random` any wrong one. The
    attack sees a model with two classes, the target and the best of the rest, so every attack can be targeted; samples
    with the same target run together.
    """

    attack: Attack
    target: int | str = "least"

    def __post_init__(self) -> None:
        if isinstance(self.target, str) and self.target not in _RULES:
            raise UserError(f"unknown target {self.target!r}; give the number of a class, or {', '.join(_RULES)}")

    __call__ = images_of
    run_with_info = images_and_info_of

    def run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, with_info: bool) -> tuple[Tensor, SampleInfo]:
        targets = self._targets(model, x.detach(), y, rng)
        found, info = x.detach().clone(), SampleInfo()
        for target in targets.unique().tolist():
            (place,) = torch.where(targets == target)
            view = seen_through(model, partial(View, read=partial(_one_versus_rest, target=target)))
            rest = torch.zeros_like(y[place])
            found[place], new = run_attack(self.attack, view, x[place], rest, rng[place], with_info)
            merge_info(info, new, place, len(x))
        return found, info

    def _targets(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG) -> Tensor:
        with frozen(model), torch.no_grad():
            logits = deployed(model)(x)
        check_classes(logits)
        if isinstance(self.target, str):
            return _RULES[self.target](likeliest_wrong(logits, y), rng)
        if not 0 <= self.target < logits.shape[1]:
            raise UserError(f"target {self.target} is no class: the model has {logits.shape[1]}, numbered from 0")
        if bool((y == self.target).any()):
            raise UserError(
                f"target {self.target} is the label of {int((y == self.target).sum())} of the samples, so there is "
                f"nothing to reach; leave that class out, or choose a target by rule: {', '.join(_RULES)}"
            )
        return torch.full_like(y, self.target)

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients, forwards + 1
