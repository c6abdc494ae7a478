"""Attacks around attacks: each takes an attack and is one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitadel.attacks.goals import clearly_fooled
from vitadel.errors import Mistake
from vitadel.instrument.hooks import frozen
from vitadel.runtime.draws import Draws
from vitadel.types import Attack

__all__ = ["Restarts"]


@dataclass(frozen=True)
class Restarts:
    """Run an attack again, with new random numbers, on the samples it has not fooled yet."""

    attack: Attack
    times: int

    def __post_init__(self) -> None:
        if self.times < 1:
            raise Mistake(f"restarts must be at least 1, got {self.times}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, draws: Draws | None = None) -> Tensor:
        draws = Draws.of_pixels(x) if draws is None else draws
        found = x.detach().clone()
        place = torch.arange(len(x), device=x.device)
        for turn in range(self.times):
            z = self.attack(model, x[place], y[place], draws[place].stream("restart", turn))
            found[place] = z
            if turn + 1 == self.times:
                break
            with frozen(model), torch.no_grad():
                place = place[~clearly_fooled(model(z), y[place])]
            if len(place) == 0:
                break
        return found

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        return gradients * self.times, forwards * self.times + self.times - 1
