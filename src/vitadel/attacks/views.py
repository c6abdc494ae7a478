"""Wrappers that show an attack another model than the one there is: towards one class, or averaged over randomness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from vitadel.attacks.losses import check_classes, likeliest_wrong
from vitadel.attacks.sample_info import Notes, join_notes, proposals
from vitadel.attacks.transfer.surrogate import deployed, seen_through
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, explained

__all__ = ["Averaged", "Targeted"]


class _Mean(nn.Module):
    """The mean logits of several passes; only one pass's activations are held at a time."""

    def __init__(self, model: nn.Module, times: int) -> None:
        super().__init__()
        self.model = model
        self.times = times

    def around(self, model: nn.Module) -> nn.Module:
        return _Mean(model, self.times)

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            passes = [self._once(x) for _ in range(self.times)]
        return torch.stack(passes).mean(0)

    def _once(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            logits: Tensor = self.model(x)
            return logits
        again: Tensor = checkpoint(self.model, x, use_reentrant=False)
        return again


@dataclass(frozen=True)
class Averaged:
    """Expectation over transformation (Athalye et al. 2018, arXiv:1707.07397): for models that answer at random.

    Losses, gradients and verdicts come from the mean logits of `times` passes. What an attack sees inside the model,
    features or attention maps, is that of the last pass.
    """

    attack: Attack
    times: int = 20

    def __post_init__(self) -> None:
        if self.times < 1:
            raise UserError(f"eot needs at least 1 pass to average, got {self.times}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.attack(self._shown(model), x, y, rng)

    def explain(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, Notes]:
        return explained(self.attack, self._shown(model), x, y, rng)

    def _shown(self, model: nn.Module) -> nn.Module:
        return seen_through(model, lambda inner: _Mean(inner, self.times))

    def passes(self) -> tuple[int, int]:
        gradients, forwards = self.attack.passes()
        # A pass with a gradient is run once more for it, instead of keeping the activations of all passes.
        return gradients * self.times, (forwards + gradients) * self.times


class _OneAgainstTheRest(nn.Module):
    """Two logits: the best of all other classes, and the target's; `fooled` then means that the target is reached."""

    def __init__(self, model: nn.Module, target: int) -> None:
        super().__init__()
        self.model = model
        self.target = target

    def around(self, model: nn.Module) -> nn.Module:
        return _OneAgainstTheRest(model, self.target)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        rest = logits.index_fill(1, torch.tensor([self.target], device=logits.device), -torch.inf).amax(1)
        return torch.stack([rest, logits[:, self.target]], dim=1)


_RULES: dict[str, Callable[[Tensor, SampleRNG], Tensor]] = {
    "next": lambda ranked, rng: ranked[:, 0],
    "least": lambda ranked, rng: ranked[:, -1],
    "random": lambda ranked, rng: _pick(ranked, rng.stream("target").uniform()),
}


def _pick(ranked: Tensor, lot: Tensor) -> Tensor:
    place = (lot * ranked.shape[1]).long().clamp(max=ranked.shape[1] - 1)
    return ranked.gather(1, place[:, None]).squeeze(1)


@dataclass(frozen=True)
class Targeted:
    """Run an attack towards a class, the same for all samples (its number) or one for each (a rule).

    `next` is the likeliest wrong class of the clean image, `least` the least likely one, `random` any wrong one. The
    attack is shown two classes, the target and the best of the rest, so it works around every attack; samples with
    the same target run together.
    """

    attack: Attack
    target: int | str = "least"

    def __post_init__(self) -> None:
        if isinstance(self.target, str) and self.target not in _RULES:
            raise UserError(f"unknown target {self.target!r}; give the number of a class, or {', '.join(_RULES)}")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self._run(model, x, y, rng, noted=False)[0]

    def explain(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> tuple[Tensor, Notes]:
        return self._run(model, x, y, rng, noted=True)

    def _run(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None, noted: bool) -> tuple[Tensor, Notes]:
        rng = SampleRNG.of_pixels(x) if rng is None else rng
        target = self._targets(model, x.detach(), y, rng)
        found, notes = x.detach().clone(), Notes()
        for each in target.unique().tolist():
            (place,) = torch.where(target == each)
            view = seen_through(model, partial(_OneAgainstTheRest, target=each))
            rest = torch.zeros_like(y[place])
            found[place], told = proposals(self.attack, view, x[place], rest, rng[place], noted)
            join_notes(notes, told, place, len(x))
        return found, notes

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
