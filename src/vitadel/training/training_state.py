"""The state of a training: what plug-ins see, and what a checkpoint holds; checkpoints are written atomically."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitadel.errors import UserError
from vitadel.evaluation.engine.target import CalibrationImages
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import write_atomically, write_json
from vitadel.runtime.secrets import read_secret, write_secret
from vitadel.training.data_stream import DataStream, MicroBatch
from vitadel.training.interfaces import Stateful
from vitadel.training.metrics import HeldOut, Metrics, ProgressTable, Score
from vitadel.training.recipes.build import Recipe
from vitadel.training.recipes.compose import IDLE, deciding
from vitadel.training.recipes.yaml_files import translate_settings
from vitadel.types import Source, Threat

if TYPE_CHECKING:
    from vitadel.training.sharding import Sharded

TIME = "time.json"
"""How many hours a training took up to its last checkpoint, validations included, summed over its devices; and how many
images passed through the model in its steps."""

_BAD_IMAGES = "partial/unreadable"
_NAMED = 1000  # images whose names a resumed run must find again
_UNFINISHED = (".checkpoint.pt.*", ".metrics.jsonl.*", "weights/.*.safetensors.*")


@dataclass
class TrainingState:
    """A running training."""

    recipe: Recipe
    model: nn.Module  # bare: never wrapped for several processes
    num_classes: int
    stream: DataStream
    held_out: HeldOut
    processes: Processes
    folder: Path
    table: ProgressTable
    metrics: Metrics
    epoch: int = 0
    step: int = 0
    best: Score | None = None
    best_epoch: int = -1
    stopped: str = ""
    back_to: int | None = None  # the epoch whose weights the model has again
    logged: dict[str, float] = field(default_factory=dict)
    hours: float = 0.0  # that its checkpoint took; what was done again after a kill counts once
    passes: int | None = 0  # of images in all steps of this process; None if they cannot be counted
    started: float = field(default_factory=time.monotonic)
    sharded: Sharded | None = None  # with train.fsdp

    def plain_model(self) -> nn.Module:
        """The model with all its weights, to write files from; all processes must call this."""
        return self.model if self.sharded is None else self.sharded.plain_model()

    @cached_property
    def images(self) -> str:
        """A digest of the images used, so that a run does not resume with others.

        Of rows, labels, and the names of some images, as a million names would take long; not of file contents.
        """
        digest = hashlib.sha256()
        stream, held_out = self.stream, self.held_out
        used = ((stream.source, stream.rows), (held_out.source, held_out.rows), (stream.extra, stream.extra_rows))
        for source, rows in used:
            if source is not None and rows is not None:
                digest.update(torch.stack([rows, source.labels()[rows]]).numpy().tobytes())
                some = rows[:: max(1, len(rows) // _NAMED)].tolist()
                digest.update("\n".join(map(source.name, some)).encode(errors="surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def threat(self) -> Threat:
        return self.recipe.threat.threat()

    @property
    def seed(self) -> int:
        return self.recipe.train.seed

    @property
    def epochs(self) -> int:
        return self.recipe.epochs

    @property
    def steps_per_epoch(self) -> int:
        return self.stream.steps_per_epoch

    @property
    def plugins(self) -> list[object]:
        return [plugin for _, plugin in self.recipe.plugins]

    def training_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        return self._sample(self.stream.source, self.stream.rows, count)

    def held_out_images(self, count: int) -> Iterable[tuple[Tensor, Tensor]]:
        return self._sample(self.held_out.source, self.held_out.rows, count)

    def _sample(self, source: Source, rows: Tensor, count: int) -> CalibrationImages:
        """In random order, as data may be sorted by class."""
        order = SampleRNG.of_samples(self.seed, rows).stream("studied").bits().argsort(stable=True)
        return CalibrationImages(source, rows[order[:count]], self.stream.preprocess, self.processes.device)

    def record_bad(self, batch: Sequence[MicroBatch]) -> None:
        """Keep the names of images that could not be read, a file each: all processes and resumed runs add to them."""
        for sample in (sample for part in batch for sample in part.bad):
            file = self.folder / _BAD_IMAGES / f"{sample.index:014d}.txt"
            if not file.exists():
                write_atomically(file, f"{sample.name}: {sample.reason}".encode(errors="backslashreplace"))

    def bad_images(self) -> list[str]:
        """What `record_bad` has kept, in the order of the data."""
        return [file.read_text("utf-8") for file in sorted((self.folder / _BAD_IMAGES).glob("*.txt"))]

    def log(self, values: Mapping[str, float]) -> None:
        self.logged.update(values)

    def report(self, message: str) -> None:
        self.table.note(message)

    tell = report  # its earlier name, which plug-ins of users may call

    def stop(self, reason: str, back_to: int | None = None) -> None:
        self.stopped = reason
        self.back_to = self.back_to if back_to is None else back_to


def find_checkpoint(state: TrainingState) -> dict[str, Any] | None:
    """The checkpoint to resume from, seen by all processes and checked to be of this recipe and these images."""
    checkpoint = read_checkpoint(state.folder, secret=state.recipe.adapter.secret)
    step = -1 if checkpoint is None else int(checkpoint["step"])
    if step != state.processes.from_main(step):
        raise UserError(
            f"process {state.processes.rank} does not see the checkpoint of the main process in {state.folder}; "
            "with several machines, --out must be on a disk that they share"
        )
    if state.processes.is_main:
        for pattern in _UNFINISHED:  # of a process killed while writing; each may be as large as a checkpoint
            for file in state.folder.glob(pattern):
                file.unlink(missing_ok=True)
    if checkpoint is not None:
        _check_same_recipe(state.folder, checkpoint, deciding(state.recipe.document))
        if checkpoint.get("images", state.images) != state.images:
            raise UserError(
                f"the images of data.train, data.validation or data.extra are not those that {state.folder} started "
                "with, so it cannot resume: held-out images might be trained on. Nothing was changed. Restore the "
                "images, or start a new run with a different --out."
            )
    return checkpoint


def save_checkpoint(state: TrainingState, optimizer: Any, accelerator: Accelerator) -> None:
    statistics = gather_statistics(state.model, state.processes)
    model, sharded = state.plain_model(), state.sharded
    optimizer_state = optimizer.state_dict() if sharded is None else sharded.optimizer_state(optimizer)
    state.metrics.save(state.step)
    if state.processes.is_main:
        best = state.best
        now = time.monotonic()
        state.hours += state.processes.count * (now - state.started) / 3600
        state.started = now
        checkpoint = {
            "step": state.step,
            "hours": state.hours,
            "passes": state.passes,
            "recipe": deciding(state.recipe.document),
            "images": state.images,
            "model": state.recipe.adapter.state(model),
            "optimiser": optimizer_state,  # the spelling of existing checkpoints
            "scaler": accelerator.scaler.state_dict() if accelerator.scaler is not None else {},
            "plugins": {name: plugin.state() for name, plugin in state.recipe.plugins if isinstance(plugin, Stateful)},
            "statistics": statistics,
            "best": None if best is None else [best.clean, best.robust, best.n, best.measure],
            "best_epoch": state.best_epoch,
            "stopped": state.stopped,
        }
        # Before the checkpoint: after the last one nothing would write it again.
        passes = None if state.passes is None else state.passes * state.processes.count
        spent = {"device_hours": state.hours, "processes": state.processes.count, "image_passes": passes}
        write_json(state.folder / TIME, spent)
        write_checkpoint(state.folder, checkpoint, secret=state.recipe.adapter.secret)
    state.processes.wait()


def restore(state: TrainingState, optimizer: Any, accelerator: Accelerator, checkpoint: Mapping[str, Any]) -> None:
    if state.sharded is None:
        state.recipe.adapter.load_state(state.model, checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimiser"])
    else:
        state.sharded.load(checkpoint["model"], optimizer, checkpoint["optimiser"])
    restore_statistics(state.model, state.processes, checkpoint["statistics"])
    if accelerator.scaler is not None and checkpoint["scaler"]:
        accelerator.scaler.load_state_dict(checkpoint["scaler"])
    for name, plugin in state.recipe.plugins:
        if isinstance(plugin, Stateful):
            plugin.load(checkpoint["plugins"][name])
    state.step, state.hours = checkpoint["step"], checkpoint.get("hours", 0.0)
    state.passes = checkpoint.get("passes")  # not counted by earlier versions
    state.best = None if checkpoint["best"] is None else Score(*checkpoint["best"])
    state.best_epoch, state.stopped = checkpoint["best_epoch"], checkpoint["stopped"]
    state.report(f"resuming after step {state.step}")


# The checkpoint file


def _checkpoint_file(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def write_checkpoint(folder: Path, checkpoint: Mapping[str, Any], secret: bool = False) -> None:
    """With `secret`, readable by the owner only."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    write = write_secret if secret else write_atomically
    write(_checkpoint_file(folder), buffer.getvalue())


def read_checkpoint(folder: Path, secret: bool = False) -> dict[str, Any] | None:
    """The checkpoint, on the CPU; None if nothing was saved yet.

    With `secret`, a `UserError` if others than the owner could read or change it.
    """
    path = _checkpoint_file(folder)
    if not path.exists():
        return None
    content = read_secret(path, allow_readable=None) if secret else path.read_bytes()
    try:
        checkpoint: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}). Remove it to start from the beginning."
        ) from error
    if not isinstance(checkpoint, dict) or "step" not in checkpoint:
        raise UserError(
            f"{path} is not a checkpoint of `vitadel harden`. Remove it to start this training from the beginning."
        )
    return checkpoint


def _check_same_recipe(folder: Path, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    recorded = translate_settings(checkpoint.get("recipe", settings))
    different = [
        f"{key}: {recorded.get(key)!r} there, {settings.get(key)!r} here"
        for key in sorted((recorded.keys() | settings.keys()) - set(IDLE))
        if recorded.get(key) != settings.get(key)
    ]
    if different:
        raise UserError(
            f"{_checkpoint_file(folder)} is the checkpoint of another recipe, so this training cannot resume from it; "
            "nothing was changed.\n  "
            + "\n  ".join(different)
            + "\nRemove it, or start a new run with a different --out."
        )


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]


def average_statistics(model: nn.Module, processes: Processes) -> None:
    """As in the light recipe (dist_bn = reduce): cheap, and every process then has the same model."""
    if processes.count == 1:
        return
    for norm in _batch_norms(model):
        for running in (norm.running_mean, norm.running_var):
            if running is not None:
                running.copy_(processes.mean(running))


def gather_statistics(model: nn.Module, processes: Processes) -> list[list[Tensor]]:
    """The statistics of every process, for a checkpoint in the middle of an epoch."""
    own = [buffer.detach().cpu().clone() for norm in _batch_norms(model) for buffer in norm.buffers()]
    all_statistics: list[list[Tensor]] = gather_object([own]) if processes.count > 1 else [own]
    return all_statistics


def restore_statistics(model: nn.Module, processes: Processes, all_statistics: Sequence[Sequence[Tensor]]) -> None:
    """Restore each process's own statistics; with another number of processes those of the first."""
    own = all_statistics[processes.rank if len(all_statistics) == processes.count else 0]
    for buffer, value in zip((b for norm in _batch_norms(model) for b in norm.buffers()), own, strict=True):
        buffer.copy_(value)


def describe_statistics(model: nn.Module, processes: Processes, attack_mode: str) -> str:
    """One sentence about the statistics of a model with BatchNorm; empty for one without."""
    norms = len(_batch_norms(model))
    if not norms:
        return ""
    of = "the images of the loss" if attack_mode == "eval" else "the images of the loss and of every attack step"
    shared = f", separately in {processes.count} processes, averaged after every epoch" if processes.count > 1 else ""
    return f"{norms} BatchNorm layers collect the statistics of {of}{shared}"
