"""The protocols that components implement: attack, threat, goal, stepper, data source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from vitadel.runtime.rng import SampleRNG

__all__ = [
    "Aim",
    "Attack",
    "Calibrated",
    "Ensemble",
    "Goal",
    "Loss",
    "OwnRules",
    "Source",
    "Step",
    "Stepper",
    "Threat",
]

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""(logits, labels) -> one value per sample; larger is worse for the model."""


class Attack(Protocol):
    """Proposes perturbed images; whether they count is for `evaluation.judge` to say.

    A frozen dataclass whose fields are its settings. Returns a detached tensor of the shape and type of `x`, inside
    the box [0, 1] and the budget of its threat, and leaves no trace on the model or on torch's global generator.
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, rng: SampleRNG | None = None) -> Tensor: ...

    def passes(self) -> tuple[int, int]:
        """The most (gradients, forwards) that one sample can cost; `plan` multiplies with it."""
        ...


@runtime_checkable
class Calibrated(Protocol):
    """An attack that studies the model on other images than the attacked ones before it can run.

    Called unprepared it is a `UserError`; `audit` prepares it with training or held-out images, never with test images.
    """

    @property
    def calibration_images(self) -> int:
        """How many images it asks for."""
        ...

    def prepared(self, model: nn.Module, calibration: Iterable[tuple[Tensor, Tensor]], seed: int = 0) -> Attack:
        """The attack ready to run; `calibration` gives batches (pixels, labels) and can be gone through repeatedly."""
        ...


@runtime_checkable
class Ensemble(Protocol):
    """An attack made of several, each on the samples that the earlier ones did not fool."""

    def members(self) -> Sequence[tuple[str, Attack]]:
        """Its attacks in order, with their names in results."""
        ...


@runtime_checkable
class OwnRules(Protocol):
    """An attack whose budget is not the norm ball it was made with: patches, for one."""

    def rules(self, model: nn.Module, x: Tensor) -> Threat:
        """The threat that its proposals obey and are judged by."""
        ...


class Threat(Protocol):
    """Where the attacker may move: a ball around each clean image, cut with the box [0, 1]."""

    @property
    def eps(self) -> float: ...

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        """The point of ball and box nearest to `z` (or one no farther from `x`)."""
        ...

    def random(self, x: Tensor, rng: SampleRNG, surface: bool = False) -> Tensor:
        """A random start inside ball and box; with `surface`, as far from `x` as both allow."""
        ...

    def ascent(self, grad: Tensor, z: Tensor) -> Tensor:
        """The direction of length one, in this norm, along which a linear function with this gradient grows most."""
        ...

    def size(self, z: Tensor, x: Tensor) -> Tensor:
        """The length of each perturbation, one number per sample."""
        ...


class Aim(Protocol):
    """A goal bound to a model and a batch: the search sees neither labels nor models."""

    def evaluate(self, z: Tensor, progress: float) -> tuple[Tensor, Tensor]:
        """(value to maximize, already fooled), one of each per sample; `progress` runs from 0 to 1."""
        ...

    def keep(self, chosen: Tensor) -> Aim:
        """The same aim for the chosen samples only; `chosen` are rows or a mask."""
        ...


class Goal(Protocol):
    """What to maximize: binds model, clean images and labels to an `Aim`."""

    @property
    def forwards(self) -> int:
        """How many forward passes per sample the binding takes, e.g. for clean outputs."""
        ...

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Aim: ...


class Step(Protocol):
    """A stepper at work on one batch."""

    def move(self, z: Tensor, grad: Tensor, turn: int) -> Tensor:
        """Where to go from `z`, before projection."""
        ...

    def keep(self, chosen: Tensor) -> Step: ...


class Stepper(Protocol):
    """How to move: turns a threat, a number of steps and the clean images into a `Step`."""

    def start(self, threat: Threat, steps: int, x: Tensor) -> Step: ...


class Source(Protocol):
    """A data set with random access. `read` may be called from several threads at once."""

    @property
    def classes(self) -> Sequence[str]:
        """Class names in the order of the labels; as many as the labels may take values."""
        ...

    def __len__(self) -> int: ...

    def labels(self) -> Tensor:
        """All labels, int64, cheap enough to call once: no image is decoded for it."""
        ...

    def read(self, indices: Sequence[int]) -> list[Image | Exception]:
        """Decoded RGB images; a sample that cannot be read gives its exception instead."""
        ...

    def name(self, index: int) -> str:
        """What a person would call this sample: its file, or row and file."""
        ...
