"""Interfaces of the parts of a training: objectives, adapters, plug-ins, and the training that plug-ins see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from vitadel.backbones.classifier import Classifier
from vitadel.runtime.distributed import Processes
from vitadel.types import Attack, Threat

if TYPE_CHECKING:
    from vitadel.training.data_stream import MicroBatch

__all__ = [
    "Adapter",
    "AfterEpoch",
    "AfterStep",
    "AroundStep",
    "BeforeEpoch",
    "BringsPlugin",
    "ChangesAttack",
    "ChangesBatch",
    "ChangesEvaluation",
    "ChecksLength",
    "ChecksModel",
    "ChecksObjective",
    "ChecksPlugins",
    "HasOwnMetric",
    "Losses",
    "NeedsAdapter",
    "NeedsLength",
    "Objective",
    "Plugin",
    "PreparesModel",
    "Stateful",
    "Training",
    "WarnsAtStart",
    "warn_late_start",
]

Losses = Callable[[], Iterable[Tensor]]
"""Computes the loss of every micro-batch of the step again, on the bare model, in train mode and with gradients.

In fp16 the loss is multiplied by the gradient scaler's factor, so use only the directions of gradients."""


class Objective(Protocol):
    """What training minimizes: a frozen dataclass whose fields are its settings.

    The loop computes `z` once per step with `attack`, on the bare model; without an attack `z` is `x`. Labels are
    class numbers, or class probabilities where images are mixed.
    """

    @property
    def attack(self) -> Attack | None: ...

    def __call__(self, model: nn.Module, x: Tensor, z: Tensor, y: Tensor) -> dict[str, Tensor]:
        """`loss`, a mean over the batch with its graph, and further values to log, without graphs."""
        ...


@runtime_checkable
class HasOwnMetric(Protocol):
    """An objective that is validated by a metric of its own instead of accuracy."""

    @property
    def measured_as(self) -> str:
        """The name of the metric, e.g. 'cosine'."""
        ...

    def measure(self, model: nn.Module, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """(on clean images, on attacked images), one value per image, at most 1; epochs are compared by the mean."""
        ...


@runtime_checkable
class NeedsAdapter(Protocol):
    """An objective for one kind of adapter."""

    @property
    def adapter(self) -> str:
        """The adapter's name in recipes."""
        ...


@runtime_checkable
class BringsPlugin(Protocol):
    """An objective with a part that is trained beside the model, such as an adversarial patch selector."""

    @property
    def companion(self) -> tuple[str, Plugin]:
        """The plug-in's name and the plug-in; it runs before those of the recipe."""
        ...


class Adapter(Protocol):
    """What is trained and saved: the whole classifier, or a small addition to a frozen one.

    Optional attributes: `trains_model` (the classifier's own parameters are trained; default False) and `keeps_head`
    (the classification head is left as it is; default False).
    """

    @property
    def secret(self) -> bool:
        """Whether only the owner may read what is trained, in every file."""
        ...

    def attach(self, model: Classifier) -> nn.Module:
        """The module to train; its parameters that require gradients are trained."""
        ...

    def shown(self, adapted: nn.Module) -> nn.Module:
        """The model that attacks in training see."""
        ...

    def state(self, adapted: nn.Module) -> dict[str, Tensor]:
        """What a checkpoint stores."""
        ...

    def load_state(self, adapted: nn.Module, state: Mapping[str, Tensor]) -> None: ...

    def save(self, adapted: nn.Module, path: Path) -> None:
        """Write what was trained, without the frozen part."""
        ...

    def deployed(self, path: Path, adapted: nn.Module) -> nn.Module:
        """Load what `save` wrote, ready to be audited; `adapted` provides the frozen part."""
        ...


@runtime_checkable
class StartsFromRun(Protocol):
    """An adapter that can continue what another run trained."""

    def without_start(self, starts: Sequence[Adapter]) -> Adapter:
        """The adapter before that run has ended: checked against the adapters that it trains, with all parts new."""
        ...


@runtime_checkable
class WarnsAtStart(Protocol):
    """An adapter with settings that the user may not want."""

    def start_warning(self) -> str | None:
        """A sentence that is printed when the training starts."""
        ...


class Training(Protocol):
    """A running training, as plug-ins see it."""

    @property
    def model(self) -> nn.Module:
        """The bare model, never wrapped for several processes."""
        ...

    @property
    def threat(self) -> Threat:
        """The threat model at full eps."""
        ...

    @property
    def processes(self) -> Processes: ...

    @property
    def folder(self) -> Path:
        """The run folder; only the main process writes there."""
        ...

    @property
    def seed(self) -> int: ...

    @property
    def epochs(self) -> int: ...

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""
        ...

    @property
    def steps_per_epoch(self) -> int: ...

    def training_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches (pixels, labels) of training images without augmentation, the same in every process and epoch."""
        ...

    def held_out_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Batches (pixels, labels) of the images held out for validation."""
        ...

    def log(self, values: Mapping[str, float]) -> None:
        """Add values to this step's line of metrics.jsonl and to the trackers."""
        ...

    def report(self, message: str) -> None:
        """Print one line for the user."""
        ...

    def stop(self, reason: str, back_to: int | None = None) -> None:
        """End the training after this epoch; `back_to` is the epoch whose weights the model has again, if any."""
        ...


Plugin = object
"""A dataclass with one or more of the methods below; its fields are its settings. State has names that start with an
underscore and is not an argument."""


@runtime_checkable
class ChecksLength(Protocol):
    """A plug-in that may have no effect in a short training."""

    def length_warning(self, epochs: int) -> str | None:
        """A sentence if it has no effect, or does not finish, in this number of epochs."""
        ...


@runtime_checkable
class NeedsLength(Protocol):
    """A plug-in that refuses a training in which its own settings say that it does nothing."""

    def check_length(self, epochs: int) -> None:
        """Raise `UserError` if it needs more epochs than these."""
        ...


@runtime_checkable
class ChecksObjective(Protocol):
    """A plug-in that does not work with every objective."""

    def check_objective(self, objective: Objective, threat: Threat) -> None:
        """Raise `UserError` if it cannot work with this objective and its attack, or this threat model."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """A plug-in or adapter that does not work with every model."""

    def check_model(self, model: Classifier) -> None:
        """Raise `UserError` if it cannot work with this model, which may have no weights; do not change the model."""
        ...


@runtime_checkable
class ChecksPlugins(Protocol):
    """A plug-in that does not work beside every other one."""

    def check_plugins(self, plugins: Iterable[Plugin]) -> None:
        """Raise `UserError` if it cannot work with one of the recipe's plug-ins."""
        ...


@runtime_checkable
class PreparesModel(Protocol):
    def prepare(self, model: Classifier) -> None:
        """Before anything else: add what the model must have from the start, such as buffers."""
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
    def change_batch(self, run: Training, part: MicroBatch) -> MicroBatch:
        """What is attacked and trained on instead of `part`, to which mixup and cutmix are already applied."""
        ...


@runtime_checkable
class AroundStep(Protocol):
    def around_step(self, run: Training, losses: Losses) -> AbstractContextManager[None]:
        """A context around forward, backward, clipping and the optimizer step."""
        ...


@runtime_checkable
class AfterStep(Protocol):
    def after_step(self, run: Training) -> None: ...


@runtime_checkable
class ChangesEvaluation(Protocol):
    def evaluated(self, run: Training) -> AbstractContextManager[None]:
        """A context in which the model is what would be deployed; it is validated and saved inside."""
        ...


@runtime_checkable
class Stateful(Protocol):
    def state(self) -> dict[str, Tensor]:
        """What a resumed training needs to continue exactly as before."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


def warn_late_start(first: int, epochs: int) -> str | None:
    """The length warning of a plug-in that starts at epoch `first`, counted from 0."""
    return f"starts at epoch {first} (from 0) of {epochs}: it has no effect" if first >= epochs else None
