"""What all checks share: the patient, its images, its clean answers, and attacks that are run once and remembered."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from vitadel.attacks.parse import make
from vitadel.attacks.threats import threat as make_threat
from vitadel.diagnosis.finding import BROKEN, OK, SUSPICIOUS, Verdict
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.judge import judge
from vitadel.instrument.hooks import frozen
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

__all__ = ["LEVELS", "ROUNDING", "Examination", "Images", "Level", "level_named", "probing_threat", "relative_change"]

ROUNDING = 1e-4
"""By which the logits of the same image may differ between two passes in float32, as a share of their size."""

Images = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Level:
    """How closely to look: images, steps and queries of the attacks that the checks share."""

    name: str
    images: int
    steps: int
    restarts: int
    queries: int
    directions: int
    averaged: int
    lessons: int  # epochs that a student learns from the model's answers

    @property
    def plain(self) -> str:
        """The attack that most others are compared with."""
        return f"pgd-{self.steps}"

    @property
    def longer(self) -> str:
        return f"pgd-{2 * self.steps}"

    @property
    def restarted(self) -> str:
        return f"{self.plain}(restarts={self.restarts})"

    @property
    def margin(self) -> str:
        return f"cw-{self.steps}"

    @property
    def other_losses(self) -> tuple[str, ...]:
        return self.margin, f"dlr-{self.steps}", f"mifpe-{self.steps}"

    @property
    def noise(self) -> str:
        return "noise(kind=surface,restarts=10)"

    @property
    def square(self) -> str:
        return f"square(queries={self.queries},rescale_schedule=true)"

    @property
    def eot(self) -> str:
        return f"eot:{self.averaged}+{self.plain}"


LEVELS = {
    "quick": Level("quick", 48, 10, 4, 100, 2, 8, 30),
    "thorough": Level("thorough", 256, 50, 5, 1000, 8, 20, 60),
}


def level_named(name: str) -> Level:
    if name not in LEVELS:
        raise UserError(f"unknown level {name!r}{nearest_names(name, LEVELS) or '.'} Allowed: {', '.join(LEVELS)}")
    return LEVELS[name]


def probing_threat(norm: str, x: Tensor) -> Threat:
    """A budget so large that nothing can withstand it: half of the way across the box of all pixels."""
    pixels = math.prod(x.shape[1:])
    widest = {"l2": math.sqrt(pixels), "l1": float(pixels)}.get(norm, 1.0)
    return make_threat(norm, widest / 2)


def _no_other_images(count: int) -> Images:
    return []


@dataclass(frozen=True, eq=False)
class Examination:
    """One visit: model and images on one device; `x` should be pixels in [0, 1], which the first check looks at.

    Attacks run on all images, each alone, in batches; a sample that is held after an attack was right before it. The
    same attack is never run twice. `others` gives batches of images that are not examined, `surrogate` is a model to
    transfer attacks from.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    norm: str = "linf"
    eps: float = 8 / 255
    level: Level = LEVELS["quick"]
    seed: int = 0
    batch_size: int = 64
    others: Callable[[int], Images] = _no_other_images
    surrogate: nn.Module | None = None
    _held: dict[tuple[str, float], Tensor] = field(default_factory=dict, repr=False)

    @property
    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)

    @cached_property
    def rng(self) -> SampleRNG:
        return self.lots(len(self.x))

    def lots(self, count: int) -> SampleRNG:
        """Draws of the first images only, or of as many lots as are needed."""
        return SampleRNG.of_samples(self.seed, range(count), self.x.device)

    @torch.no_grad()
    def answers(self, x: Tensor, model: nn.Module | None = None) -> Tensor:
        """Logits, batch by batch, in whatever mode the model is in."""
        asked = self.model if model is None else model
        return torch.cat([asked(part) for part in x.split(self.batch_size)])

    @cached_property
    def logits(self) -> Tensor:
        """Of the clean images, in eval mode."""
        with frozen(self.model):
            return self.answers(self.x)

    @cached_property
    def correct(self) -> Tensor:
        return self.logits.argmax(1) == self.y

    @cached_property
    def randomised(self) -> float:
        """How far the same images' logits differ between two calls in eval mode, as a share of their size.

        Of clean images and of noisy ones: a defence may be asleep until something looks attacked.
        """
        clean = self.few(16)
        few = torch.cat([clean, self.threat.random(clean, self.lots(len(clean)).stream("asked twice"), surface=True)])
        small = replace(self, batch_size=min(4, self.batch_size))  # what is drawn once per batch may fall alike once
        with frozen(self.model):
            first = small.answers(few)
            small.answers(self.x[-16:].flip(3))  # a model with a memory has other images to remember now
            again = small.answers(few)
        return relative_change(first, again)

    @cached_property
    def rounding(self) -> float:
        """By which the logits of the same image may differ between two passes of this model, in its precision."""
        precisions = {self.logits.dtype, *(weight.dtype for weight in self.model.parameters())}
        coarsest = max(torch.finfo(precision).eps for precision in precisions if precision.is_floating_point)
        return max(ROUNDING, coarsest)

    @property
    def at_random(self) -> bool:
        return self.randomised > self.rounding

    def verdict_on_change(self, change: float, flipped: int) -> Verdict:
        """On answers that should be the same by other ways of computing them, where kernels round differently."""
        allowed = 10 * self.rounding
        if change <= allowed:
            return OK
        return BROKEN if flipped or change > 10 * allowed else SUSPICIOUS

    def few(self, count: int) -> Tensor:
        return self.x[:count]

    def held(self, name: str, attack: Attack | None = None, eps: float | None = None) -> Tensor:
        """Which images are right, clean and after the attack: by its name, or a made one that is known by `name`."""
        budget = self.eps if eps is None else eps
        if (name, budget) not in self._held:
            self._held[name, budget] = self._judged(name, attack, budget, self.correct)
        return self._held[name, budget]

    def broken_among(self, exposed: Tensor, name: str, attack: Attack | None = None) -> int:
        """How many of the exposed images, which should be right, an attack breaks; the others cost nothing."""
        return int((exposed & ~self._judged(name, attack, self.eps, exposed)).sum())

    def _judged(self, name: str, attack: Attack | None, eps: float, exposed: Tensor) -> Tensor:
        ready = make(name, eps=eps, norm=self.norm) if attack is None else attack
        threat, held = make_threat(self.norm, eps), exposed.clone()
        with frozen(self.model):
            for rows in exposed.nonzero().squeeze(1).split(self.batch_size):
                x, y = self.x[rows], self.y[rows]
                held[rows] = judge(self.model, threat, x, ready(self.model, x, y, self.rng[rows]), y).held
        return held

    def crafted(self, attack: Attack, model: nn.Module | None = None, x: Tensor | None = None) -> Tensor:
        """What an attack makes of all images, batch by batch, unjudged."""
        asked, images = self.model if model is None else model, self.x if x is None else x
        places = torch.arange(len(images), device=images.device).split(self.batch_size)
        return torch.cat([attack(asked, images[rows], self.y[rows], self.rng[rows]) for rows in places])

    def share(self, held: Tensor) -> float:
        return float(held.double().mean())

    @cached_property
    def exact(self) -> nn.Module:
        """A copy in float64, in eval mode; the model as it is where it cannot be copied or run so."""
        try:
            double = copy.deepcopy(self.model).double().eval()
            with torch.no_grad():
                double(self.few(min(2, self.batch_size)).double())
        except Exception:  # whatever a foreign model has against it, float32 will do
            return self.model
        return double

    @cached_property
    def answers_exactly(self) -> bool:
        """A model that ends in `.float()` computes exactly and answers in float32."""
        few = self.few(1).to(self.exact_dtype)
        return self.exact is not self.model and self.answers(few, self.exact).dtype == torch.float64

    @property
    def exact_dtype(self) -> torch.dtype:
        return self.x.dtype if self.exact is self.model else torch.float64


def relative_change(first: Tensor, second: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))
