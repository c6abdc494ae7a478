"""PGD: projected gradient ascent on a goal (Madry et al. 2018, arXiv:1706.06083)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitadel.attacks.gain_ratio import GAINS, GainRecorder
from vitadel.attacks.goals import OnLogits, gradient
from vitadel.attacks.per_sample import SampleInfo, takes_arrays
from vitadel.attacks.steppers import Steepest
from vitadel.backbones.classifier import check_pixels
from vitadel.errors import UserError
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Goal, Stepper, Threat


@dataclass(frozen=True)
class PGD:
    """Maximize the goal inside the threat's ball; one step without a random start is FGSM.

    The search starts at a random point of the ball (`random_start`), on its surface (`surface_start`), or at the clean
    image plus normal noise of standard deviation `start_noise`, projected to ball and box.

    With `stop_when_fooled` a sample stops at its first adversarial iterate: no later step can lose it, and it costs no
    further passes. Training attacks switch this off.
    """

    threat: Threat
    goal: Goal = field(default_factory=OnLogits)
    stepper: Stepper = field(default_factory=Steepest)
    steps: int = 10
    random_start: bool = True
    surface_start: bool = False
    stop_when_fooled: bool = True
    start_noise: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"an attack needs at least 1 step, got {self.steps}")
        if self.start_noise is not None and self.start_noise <= 0:
            raise UserError(f"start_noise must be positive, got {self.start_noise:g}; leave it out for no noise")
        if self.surface_start + (self.start_noise is not None) > self.random_start:
            raise UserError(
                "a search has one start: the clean image without random_start, else a random point of the ball, of its "
                "surface (surface_start) or near the clean image (start_noise, or noise in a name)"
            )

    @takes_arrays
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor:
        return self.search(model, x, y, rng)

    def run_with_info(
        self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None
    ) -> tuple[Tensor, SampleInfo]:
        """With the sums over its steps of what they promised and delivered; a single step leaves no value behind."""
        if self.steps == 1:
            return self.search(model, x, y, rng), {}
        gains = GainRecorder.of(self.threat, x)
        return self.search(model, x, y, rng, gains), {GAINS: gains.sums}

    def search(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        rng: SampleRNG | None = None,
        gains: GainRecorder | None = None,
    ) -> Tensor:
        """The attack's images; `gains` records what its steps promise and deliver."""
        check_pixels(x)
        x = x.detach()
        with frozen(model):
            return self._search(model, x, y, SampleRNG.of_pixels(x) if rng is None else rng, gains)

    def _search(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG, gains: GainRecorder | None) -> Tensor:
        aim, step = self.goal(model, x, y), self.stepper.start(self.threat, self.steps, x)
        z = self._start(x, rng.stream("start"))
        found = z.clone()
        place = torch.arange(len(x), device=x.device)  # of the samples not fooled yet
        for turn in range(self.steps):
            with torch.enable_grad():
                z.requires_grad_()
                values, fooled = aim.evaluate(z, turn / self.steps)
                if gains is not None:
                    gains.arrive(place, values.detach())
                rest = (~fooled).nonzero()[:, 0] if self.stop_when_fooled else place  # the one wait for the device
                if len(rest) < len(place):
                    found[place] = z.detach()  # those that are not fooled yet are written again
                    if len(rest) == 0:
                        return found
                grad = gradient(values, z)
            z, value = z.detach(), values.detach()
            if len(rest) < len(place):
                place, z, x, value, grad = place[rest], z[rest], x[rest], value[rest], grad[rest]
                aim, step = aim.keep(rest), step.keep(rest)
            moved = self.threat.project(step.move(z, grad, turn), x)
            if gains is not None:
                gains.depart(place, value, grad, z, moved)
            z = moved
        found[place] = z
        return found

    def _start(self, x: Tensor, rng: SampleRNG) -> Tensor:
        if not self.random_start:
            return x.clone()
        if self.start_noise is None:
            return self.threat.random(x, rng, self.surface_start)
        return self.threat.project(x + self.start_noise * rng.normal(*x.shape[1:]).to(x.dtype), x)

    def passes(self) -> tuple[int, int]:
        return self.steps, self.goal.forwards
