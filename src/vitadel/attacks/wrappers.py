"""Attacks around attacks: each takes an attack and is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import clearly_fooled
from vitadel.attacks.sample_info import Notes, join_notes, proposals
from vitadel.attacks.transfer.surrogate import deployed
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack

__all__ = ["MEMBER", "Restarts", "WorstOf", "repeated"]

MEMBER = "member"
"""The stream of draws that a member of an ensemble gets, with its number."""


def _standing(model: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    """Which proposals do not fool the model."""
    with frozen(model), torch.no_grad():
        return ~clearly_fooled(deployed(model)(z), y)


def _one_after_the_other(
    attacks: Sequence[tuple[Attack, str, int]],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    rng: SampleRNG | None,
    noted: bool,
) -> tuple[Tensor, Notes]:
    """Each attack, with its own stream of draws, on the samples that the ones before did not fool."""
    rng = SampleRNG.of_pixels(x) if rng is None else rng
    found, notes = x.detach().clone(), Notes()
    place = torch.arange(len(x), device=x.device)
    for number, (attack, stream, turn) in enumerate(attacks):
        z, told = proposals(attack, model, x[place], y[place], rng[place].stream(stream, turn), noted)
        found[place] = z
        join_notes(notes, told, place, len(x))
        if number + 1 < len(attacks):  # whether the last one succeeded is for the judge to say
            place = place[_standing(model, z, y[place])]
        if len(place) == 0:
            break
    return found, notes


@dataclass(frozen=True)
class Restarts:
    """Run an attack again, with new random numbers, on the samples it has not fooled yet."""

    attack: Attack
    times: int

    def __post_init__(self) -> None:
        if self.times < 1:
            raise UserError(f"restarts must be at least 1, got {self.times}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return _one_after_the_other(self._turns, model, x, y, rng, noted=False)[0]

    def explain(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, Notes]:
        """With the notes of the last run that each sample saw."""
        return _one_after_the_other(self._turns, model, x, y, rng, noted=True)

    @property
    def _turns(self) -> list[tuple[Attack, str, int]]:
        return [(self.attack, "restart", turn) for turn in range(self.times)]

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients * self.times, forwards * self.times + self.times - 1


def repeated(attack: Attack, restarts: int) -> Attack:
    """The attack itself where it runs once."""
    return attack if restarts == 1 else Restarts(attack, restarts)


@dataclass(frozen=True)
class WorstOf:
    """Several attacks, each on the samples that the ones before it left standing: the pointwise worst case.

    `names` say what each is called in results; `audit` runs the members as stages of their own, with the same draws.
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

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return _one_after_the_other(self._crew, model, x, y, rng, noted=False)[0]

    def explain(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, Notes]:
        """With the notes of the last member that each sample met."""
        return _one_after_the_other(self._crew, model, x, y, rng, noted=True)

    @property
    def _crew(self) -> list[tuple[Attack, str, int]]:
        return [(attack, MEMBER, number) for number, attack in enumerate(self.attacks)]

    def passes(self) -> tuple[int, int]:
        gradients, forwards = zip(*(attack.passes() for attack in self.attacks), strict=True)
        return sum(gradients), sum(forwards) + len(self.attacks) - 1
