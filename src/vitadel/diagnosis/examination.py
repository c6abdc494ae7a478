"""What all checks share: the settings, the model, its images and clean logits, and attacks that run only once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from vitadel.adapters.adapted_model import open_model
from vitadel.attacks.parse import make
from vitadel.attacks.threats import make_threat
from vitadel.data.batches import BadSample, Batch, balanced_subset, read_batches
from vitadel.errors import UserError, nearest_names
from vitadel.evaluation.engine.stages import check_any_readable, judge
from vitadel.evaluation.engine.target import (
    CALIBRATION_BATCH,
    CalibrationImages,
    Target,
    apply_class_subset,
    calibration_images,
    subset_like,
)
from vitadel.findings import BROKEN, OK, SUSPICIOUS, Verdict
from vitadel.instrument.hooks import frozen
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.diagnosis.run import DiagnosisRequest

FEWEST = 16
_ROUNDING = 1e-4  # relative difference allowed between the logits of two float32 passes over the same image

Images = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Level:
    """How thorough a diagnosis is: number of images, and the settings of the attacks that the checks share."""

    name: str
    images: int
    steps: int
    restarts: int
    queries: int
    directions: int
    eot_samples: int
    student_epochs: int

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

    def square(self, queries: int) -> str:
        return f"square(queries={queries},rescale_schedule=true)"

    @property
    def eot(self) -> str:
        return f"eot:{self.eot_samples}+{self.plain}"


LEVELS = {
    "quick": Level("quick", 48, 10, 4, 500, 2, 8, 30),
    "thorough": Level("thorough", 256, 50, 5, 1000, 8, 20, 60),
}


def level_named(name: str) -> Level:
    if name not in LEVELS:
        raise UserError(f"unknown level {name!r}{nearest_names(name, LEVELS) or '.'} Allowed: {', '.join(LEVELS)}")
    return LEVELS[name]


def attack_cost(name: str) -> tuple[float, float]:
    """(gradients, forwards) per image of an attack, with one forward to judge its result."""
    gradients, forwards = make(name).passes()
    return float(gradients), float(forwards + 1)


def probing_threat(norm: str, x: Tensor) -> Threat:
    """A budget so large that no model can be robust: half of the diameter of the pixel box."""
    pixels = math.prod(x.shape[1:])
    diameter = {"l2": math.sqrt(pixels), "l1": float(pixels)}.get(norm, 1.0)
    return make_threat(norm, diameter / 2)


@dataclass(frozen=True, eq=False)
class Examination:
    """A model and its images on one device. `x` should be pixels in [0, 1]; the first check tests that.

    Attacks run on all images in batches, with a random stream per image; the same attack never runs twice. An image is
    robust if it is classified correctly before and after an attack. `other_images` gives batches of images that are
    not examined, `surrogate` is a model to transfer attacks from.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    norm: str = "linf"
    eps: float = 8 / 255
    level: Level = LEVELS["quick"]
    seed: int = 0
    batch_size: int = 64
    other_images: Callable[[int], Images] = lambda count: []
    surrogate: nn.Module | None = None
    _robust: dict[tuple[str, float], Tensor] = field(default_factory=dict, repr=False)

    @property
    def threat(self) -> Threat:
        return make_threat(self.norm, self.eps)

    @cached_property
    def rng(self) -> SampleRNG:
        return self.rng_of(len(self.x))

    def rng_of(self, count: int) -> SampleRNG:
        """Random streams of the first `count` images."""
        return SampleRNG.of_samples(self.seed, range(count), self.x.device)

    @torch.no_grad()
    def logits_of(self, x: Tensor, model: nn.Module | None = None) -> Tensor:
        """Logits, batch by batch, in whatever mode the model is in."""
        asked = self.model if model is None else model
        return torch.cat([asked(part) for part in x.split(self.batch_size)])

    @cached_property
    def logits(self) -> Tensor:
        """Logits of the clean images, in eval mode."""
        with frozen(self.model):
            return self.logits_of(self.x)

    @cached_property
    def correct(self) -> Tensor:
        return self.logits.argmax(1) == self.y

    @cached_property
    def output_noise(self) -> float:
        """Relative difference between the logits of the same images in two calls in eval mode.

        Clean and noisy images are used, because a defense may be inactive on clean ones.
        """
        clean = self.first(16)
        noisy = self.threat.random(clean, self.rng_of(len(clean)).stream("asked twice"), surface=True)
        images = torch.cat([clean, noisy])
        # Small batches: what is drawn once per batch might be the same by chance in a single one.
        small = replace(self, batch_size=min(4, self.batch_size))
        with frozen(self.model):
            first = small.logits_of(images)
            small.logits_of(self.x[-16:].flip(3))  # other images in between, for models that keep state
            again = small.logits_of(images)
        return relative_change(first, again)

    @cached_property
    def masking_modules(self) -> dict[str, float]:
        """The modules whose gradient does not match what their output does, found for the first check that asks."""
        from vitadel.attacks.bpda import find_masking_modules  # few models need it

        return find_masking_modules(self.model, self.first(4), self.seed)

    @cached_property
    def rounding(self) -> float:
        """Relative difference allowed between two passes over the same image, in this model's precision."""
        dtypes = {self.logits.dtype, *(weight.dtype for weight in self.model.parameters())}
        return max(_ROUNDING, *(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point))

    @property
    def is_random(self) -> bool:
        return self.output_noise > self.rounding

    def verdict_on_change(self, change: float, flipped: int) -> Verdict:
        """Judge a difference between logits that should be equal, up to the rounding of different kernels."""
        allowed = 10 * self.rounding
        if change <= allowed:
            return OK
        return BROKEN if flipped or change > 10 * allowed else SUSPICIOUS

    def first(self, count: int) -> Tensor:
        return self.x[:count]

    def robust(self, name: str, attack: Attack | None = None, eps: float | None = None) -> Tensor:
        """Which images are robust to an attack, given by its name, or as an object that is cached under `name`."""
        budget = self.eps if eps is None else eps
        if (name, budget) not in self._robust:
            self._robust[name, budget] = self._attack(name, attack, budget, self.correct)
        return self._robust[name, budget]

    @property
    def attacks_done(self) -> set[str]:
        """The attacks that have run with the budget of the diagnosis."""
        return {name for name, eps in self._robust if eps == self.eps}

    def broken_among(self, exposed: Tensor, name: str, attack: Attack | None = None) -> int:
        """How many of the `exposed` images, which must be correctly classified, an attack breaks."""
        return int((exposed & ~self.robust_among(exposed, name, attack)).sum())

    def robust_among(self, exposed: Tensor, name: str, attack: Attack | None = None) -> Tensor:
        """Which of the `exposed` images are robust to an attack."""
        return self._attack(name, attack, self.eps, exposed)

    def _attack(self, name: str, attack: Attack | None, eps: float, exposed: Tensor) -> Tensor:
        ready = make(name, eps=eps, norm=self.norm) if attack is None else attack
        threat, robust = make_threat(self.norm, eps), exposed.clone()
        with frozen(self.model):
            for rows in exposed.nonzero().squeeze(1).split(self.batch_size):
                x, y = self.x[rows], self.y[rows]
                robust[rows] = judge(self.model, threat, x, ready(self.model, x, y, self.rng[rows]), y).held
        return robust

    def craft(self, attack: Attack, model: nn.Module | None = None, x: Tensor | None = None) -> Tensor:
        """Attack all images batch by batch, without judging the result."""
        asked, images = self.model if model is None else model, self.x if x is None else x
        places = torch.arange(len(images), device=images.device).split(self.batch_size)
        return torch.cat([attack(asked, images[rows], self.y[rows], self.rng[rows]) for rows in places])

    def share(self, chosen: Tensor) -> float:
        return float(chosen.double().mean())

    @cached_property
    def double_model(self) -> nn.Module:
        """A copy in float64 and eval mode, or the model itself if it cannot be copied or run in float64."""
        try:
            double = copy.deepcopy(self.model).double().eval()
            with torch.no_grad():
                double(self.first(min(2, self.batch_size)).double())
        except Exception:  # any error of third-party code: fall back to the model's own precision
            return self.model
        return double

    @cached_property
    def has_double_logits(self) -> bool:
        """Whether the logits are float64, too; they are not if the model ends in `.float()`."""
        first = self.first(1).to(self.double_dtype)
        return self.double_model is not self.model and self.logits_of(first, self.double_model).dtype == torch.float64

    @property
    def double_dtype(self) -> torch.dtype:
        return self.x.dtype if self.double_model is self.model else torch.float64


def relative_change(first: Tensor, second: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))


def examination_of_tensors(
    model: nn.Module,
    pixels: Tensor,
    labels: Tensor,
    request: DiagnosisRequest,
    processes: Processes,
    surrogate: str | nn.Module | None,
) -> Examination:
    """Examine as many of the given images as requested; a student may be trained on the others."""
    if labels.ndim != 1 or labels.is_floating_point() or len(pixels) != len(labels):
        raise UserError(
            f"diagnose takes pixels (n, channels, height, width) and integer labels (n); got shapes "
            f"{tuple(pixels.shape)} and {tuple(labels.shape)}, labels of {labels.dtype}"
        )
    check_enough(len(labels))
    if int(labels.min()) < 0:
        raise UserError(f"labels must be 0 or more, got {int(labels.min())}; leave out images without a label")
    known = labels.cpu().long()
    chosen = balanced_subset(known, request.images, request.seed)
    rest = torch.ones(len(known), dtype=torch.bool)
    rest[chosen] = False
    spare = rest.nonzero()[:, 0]

    def select(rows: Tensor) -> tuple[Tensor, Tensor]:
        return pixels[rows.to(pixels.device)].to(processes.device), known[rows].to(processes.device)

    def others(count: int) -> Images:
        rows = balanced_subset(known[spare], count, request.seed, spare)
        return [select(part) for part in rows.split(CALIBRATION_BATCH)] if len(rows) else []

    return _examine(model, *select(chosen), request, processes, others, surrogate)


def _examine(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    request: DiagnosisRequest,
    processes: Processes,
    other_images: Callable[[int], Images],
    surrogate: str | nn.Module | None,
) -> Examination:
    named = request.surrogate if surrogate is None else surrogate
    other = open_model(named) if isinstance(named, str) else named
    return Examination(
        model.to(processes.device),
        x,
        y,
        norm=request.norm,
        eps=request.eps,
        level=request.depth,
        seed=request.seed,
        batch_size=request.batch_size,
        other_images=other_images,
        surrogate=None if other is None else subset_like(model, other.to(processes.device).eval()),
    )


def examination_of(
    target: Target, request: DiagnosisRequest, processes: Processes, surrogate: str | nn.Module | None = None
) -> tuple[Examination, Batch, Sequence[BadSample]]:
    """Load the images onto the model's device; also returns their batch and the samples left out for their label."""
    target = apply_class_subset(target)
    indices, mislabeled = target.selection(request.images, request.seed, request.skip_bad)
    how: dict[str, Any] = {"skip_bad": request.skip_bad, "device": processes.device}
    (batch,) = read_batches(target.source, [indices.tolist()], target.preprocess, **how)
    check_any_readable(len(batch.y))

    def others(count: int) -> Images:
        try:
            source, rows = calibration_images(target, indices, None, count, request.seed)
        except UserError:  # all images are examined
            return []
        return list(CalibrationImages(source, rows, target.preprocess, processes.device, skip_bad=True))

    model = cast(nn.Module, target.model.to(processes.device))
    return _examine(model, batch.x, batch.y, request, processes, others, surrogate), batch, mislabeled


def check_enough(images: int) -> None:
    if images < FEWEST:
        raise UserError(f"diagnose needs at least {FEWEST} images: fewer prove nothing; got {images}")
