"""The shapes that a training is composed of: objectives, plug-ins, and what a plug-in may ask of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.runtime.distributed import Processes
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.training.data_stream import Part

__all__ = [
    "Accompanied",
    "Adapter",
    "AfterEpoch",
    "AfterStep",
    "AroundStep",
    "BeforeEpoch",
    "ChangesAttack",
    "ChangesBatch",
    "ChangesEvaluation",
    "Losses",
    "Measures",
    "MindsLength",
    "NeedsAdapter",
    "Objective",
    "Plugin",
    "Prepares",
    "Remembering",
    "Training",
]

Losses = Callable[[], Iterable[Tensor]]
"""The loss of every part of the step's batch, computed anew on the bare model, in train mode and with gradients.

In fp16 it is multiplied as the optimizer's own is, lest small gradients round to zero: directions are to be trusted,
lengths are not."""


class Objective(Protocol):
    """What training minimises: a frozen dataclass whose fields are its settings.

    The loop makes `z` once per step with `attack`, on the bare model; without an attack `z` is `x`. Labels are whole
    numbers, or one probability per class where images are mixed.
    """

    @property
    def attack(self) -> Attack | None: ...

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        """`loss`, a mean over the batch with its graph, and further numbers to log, without graphs."""
        ...


@runtime_checkable
class Measures(Protocol):
    """An objective whose success is not a share of right answers."""

    @property
    def measured_as(self) -> str:
        """What the numbers are, e.g. 'cosine'."""
        ...

    def measure(self, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """(on clean images, on attacked ones), a number for each image, at most 1; epochs are compared by the mean."""
        ...


@runtime_checkable
class MindsLength(Protocol):
    """A plug-in that may have nothing to do in a short training."""

    def length_warning(self, epochs: int) -> str | None:
        """What to tell if it comes to nothing, or not to its end, in so many epochs."""
        ...


@runtime_checkable
class NeedsAdapter(Protocol):
    """An objective of one kind of adapter."""

    @property
    def adapter(self) -> str:
        """The adapter's name in recipes."""
        ...


class Adapter(Protocol):
    """What is trained and kept: the whole classifier, or something small on top of a frozen one."""

    @property
    def secret(self) -> bool:
        """Whether what is trained is for its owner's eyes only, in every file."""
        ...

    def attach(self, model: Classifier) -> nn.Module:
        """The module to train; it learns by those of its parameters that require gradients."""
        ...

    def shown(self, adapted: nn.Module) -> nn.Module:
        """What attacks in training see of it."""
        ...

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        ...

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None: ...

    def save(self, adapted: nn.Module, path: Path) -> None:
        """Without what it was attached to."""
        ...

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        """What `save` wrote, ready to be audited; `adapted` has the frozen part, if there is one."""
        ...


class Training(Protocol):
    """A training under way, as plug-ins see it."""

    @property
    def model(self) -> nn.Module:
        """The bare classifier, never wrapped for several processes."""
        ...

    @property
    def threat(self) -> Threat:
        """At full eps."""
        ...

    @property
    def processes(self) -> Processes: ...

    @property
    def folder(self) -> Path:
        """Where the run is kept; only the main process writes there."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def epochs(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The one being trained, from 0."""
        ...

    @property
    def step(self) -> int:
        """Optimiser steps taken so far."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def training_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches (pixels, labels) of training images without augmentation, the same in every process and epoch."""
        ...

    def held_out_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        """The same of the images that are held out for validation."""
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Numbers for this step's line of metrics.jsonl and the trackers."""
        ...

    def tell(self, message: str) -> None:
        """One line for the person who watches."""
        ...

    def stop(self, reason: str, back_to: int | None = None) -> None:
        """End the training after this epoch, as if it had been its last; with the weights of `back_to`, if given."""
        ...


Plugin = object
"""A dataclass that has one or two of the shapes below; its fields are its settings, its state starts with an
underscore and is no argument."""


@runtime_checkable
class Accompanied(Protocol):
    """An objective with something that learns beside the model, such as an opponent."""

    @property
    def companion(self) -> tuple[str, Plugin]:
        """Its name and itself, a plug-in: it comes before those of the recipe."""
        ...


@runtime_checkable
class Prepares(Protocol):
    def prepare(self, model: Classifier) -> None:
        """Before anything else: what the model must have from the start, such as further buffers."""
        ...


@runtime_checkable
class BeforeEpoch(Protocol):
    def before_epoch(self, run: Training) -> None: ...


@runtime_checkable
class AfterEpoch(Protocol):
    def after_epoch(self, run: Training) -> None: ...


@runtime_checkable
class ChangesAttack(Protocol):
    def change_attack(self, run: Training, attack: Attack) -> Attack | None:
        """The attack for this step; None if this step trains on clean images."""
        ...


@runtime_checkable
class ChangesBatch(Protocol):
    def change_batch(self, run: Training, part: Part) -> Part:
        """What is attacked and learnt from in place of `part`, whose images are mixed already, if they are at all."""
        ...


@runtime_checkable
class AroundStep(Protocol):
    def around_step(self, run: Training, losses: Losses) -> AbstractContextManager[None]:
        """A block around forward, backward, clipping and the optimizer's step."""
        ...


@runtime_checkable
class AfterStep(Protocol):
    def after_step(self, run: Training) -> None: ...


@runtime_checkable
class ChangesEvaluation(Protocol):
    def evaluated(self, run: Training) -> AbstractContextManager[None]:
        """A block in which the model is what would be deployed: validated and saved inside it."""
        ...


@runtime_checkable
class Remembering(Protocol):
    def state(self) -> dict[str, Tensor]:
        """What a resumed training needs to go on exactly as before."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...
