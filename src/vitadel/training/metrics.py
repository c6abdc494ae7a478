"""What a training measures and shows: scores on held-out images, metrics.jsonl, trackers, the progress table, passes.

Models are selected by their score on held-out images, at full eps.
"""

from __future__ import annotations

import errno
import json
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from vitadel.backbones.anatomy import blocks_of
from vitadel.data.batches import Batch, Preprocess, read_batches
from vitadel.errors import UserError
from vitadel.evaluation.engine.stages import judge
from vitadel.instrument.hooks import frozen
from vitadel.quantities import duration
from vitadel.runtime.distributed import Processes
from vitadel.runtime.rng import SampleRNG
from vitadel.runtime.run_folder import append, disk_errors_reported, write_atomically
from vitadel.types import Attack, Source, Threat

_BATCH = 128  # held-out images at once
_FOLDER = "tracker"
_NETWORK_ERRNOS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}


@dataclass(frozen=True)
class Score:
    """Clean and robust accuracy of `n` held-out images, or means of another `measure`; `robust` may be None."""

    clean: float
    robust: float | None
    n: int
    measure: str = "accuracy"

    @property
    def decisive(self) -> tuple[float, float]:
        """The key by which epochs are compared: robust accuracy, then clean accuracy; of other measures the mean.

        Ties are common: a standard model has a robust accuracy of 0 in every epoch.
        """
        if self.robust is None:
            return self.clean, 0.0
        if self.measure == "accuracy":
            return self.robust, self.clean
        return (self.clean + self.robust) / 2, self.robust

    def as_metrics(self) -> dict[str, float]:
        """The values under their names in metrics.jsonl."""
        prefix = "validation_" if self.measure == "accuracy" else f"validation_{self.measure}_"
        values = {f"{prefix}clean": self.clean}
        return values if self.robust is None else {**values, f"{prefix}robust": self.robust}


@dataclass(frozen=True)
class HeldOut:
    """Images that are not trained on."""

    source: Source
    rows: Tensor
    preprocess: Preprocess
    bad: tuple[str, ...] = ()  # images that could not be read and are left out

    def without_bad(self) -> HeldOut:
        """Only the images that can be read; reads them all."""
        good, bad = [], []
        for row in self.rows.tolist():
            image = self.source.read([row])[0]
            if isinstance(image, Exception):
                bad.append(f"{self.source.name(row)}: {image}")
            else:
                good.append(row)
        if not good:
            raise UserError(f"none of the {len(bad)} held-out images can be read, the first {bad[0]}.")
        return replace(self, rows=torch.tensor(good), bad=tuple(bad))

    def _batches(self, processes: Processes) -> Iterator[Batch]:
        """This process's share of the images."""
        chunks = [part.tolist() for part in self.rows[processes.rank :: processes.count].split(_BATCH)]
        return read_batches(self.source, chunks, self.preprocess, threads=1, device=processes.device)

    def measure(
        self,
        model: nn.Module,
        shown: nn.Module,
        attack: Attack,
        metric: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]],
        name: str,
        processes: Processes,
        seed: int,
    ) -> Score:
        """Means of an objective's own metric; the attack sees the model `shown`."""
        sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
        with frozen(model):
            for batch in self._batches(processes):
                rng = SampleRNG.of_samples(seed, batch.indices, batch.x.device).stream("validation")
                z = attack(shown, batch.x, batch.y, rng)
                with torch.no_grad():
                    sums += torch.stack([values.double().sum() for values in metric(model, batch.x, z)])
        clean, robust = (processes.mean(sums) * processes.count / len(self.rows)).tolist()
        return Score(clean, robust, len(self.rows), name)

    def score(self, model: nn.Module, attack: Attack | None, threat: Threat, processes: Processes, seed: int) -> Score:
        """Clean and robust accuracy, judged as in an audit; every process takes its share of the images."""
        clean = robust = 0
        with frozen(model):
            for batch in self._batches(processes):
                with torch.no_grad():
                    correct = model(batch.x).argmax(1) == batch.y
                clean += int(correct.sum())
                if attack is None or not bool(correct.any()):
                    continue
                x, y = batch.x[correct], batch.y[correct]
                rng = SampleRNG.of_samples(seed, batch.indices[correct.cpu()], x.device).stream("validation")
                robust += int(judge(model, threat, x, attack(model, x, y, rng), y).held.sum())
        counts = processes.mean(torch.tensor([clean, robust], dtype=torch.float64, device=processes.device))
        clean_all, robust_all = (counts * processes.count).round().tolist()
        n = len(self.rows)
        return Score(clean_all / n, None if attack is None else robust_all / n, n)


@dataclass
class Metrics:
    """metrics.jsonl: one line per step and epoch, none missing and none twice, however often a training is killed.

    Lines wait in memory for their checkpoint; with `path` None they are not written.
    """

    path: Path | None
    saved: int = 0  # the step of the last checkpoint
    waiting: list[str] = field(default_factory=list)

    def resume(self, step: int, since: int = 0) -> list[dict[str, float]]:
        """Delete lines written after the checkpoint at `step`; returns the lines of the steps after `since`."""
        self.saved = step
        if self.path is None or not self.path.exists():
            return []
        lines = self.path.read_text().splitlines(keepends=True)
        try:
            read = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
            kept = [(line, row) for line, row in read if row["step"] <= step]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{self.path} is damaged: {error!r}. Restore it, or train again with another --out."
            ) from error
        if len(kept) != len(lines):
            write_atomically(self.path, "".join(line for line, _ in kept).encode())
        rows: list[dict[str, float]] = [row for _, row in kept]
        return [row for row in rows if row["step"] > since and "epoch" not in row]

    def add(self, step: int, row: Mapping[str, float]) -> None:
        self.waiting.append(json.dumps({"step": step, **row}) + "\n")

    def save(self, step: int) -> None:
        """Write the lines, before the checkpoint: surplus lines can be deleted, missing ones not restored."""
        if self.path is not None:
            append(self.path, "".join(self.waiting))
        self.waiting.clear()
        self.saved = step


def start_tracking(accelerator: Accelerator, tracker: str, settings: Mapping[str, Any], folder: Path) -> None:
    with _tracker_errors_reported(tracker, folder):
        if tracker in ("tensorboard", "all"):
            accelerator.init_trackers(_FOLDER)  # in the run folder, beside recipe.yaml
        elif tracker != "none":  # elsewhere, so that it needs the settings
            accelerator.init_trackers("vitadel", config={key: str(value) for key, value in settings.items()})


def track(accelerator: Accelerator, tracker: str, row: Mapping[str, float], step: int, folder: Path) -> None:
    """A full disk may show here first: TensorBoard writes in the background and raises at the next call."""
    with _tracker_errors_reported(tracker, folder):
        accelerator.log(dict(row), step=step)


def end_tracking(accelerator: Accelerator, tracker: str, folder: Path) -> None:
    """Not by `end_training`, which would end the other processes before the audit."""
    with _tracker_errors_reported(tracker, folder):
        for each in accelerator.trackers:
            each.finish()


@contextmanager
def _tracker_errors_reported(tracker: str, folder: Path) -> Iterator[None]:
    with disk_errors_reported(folder / _FOLDER):
        try:
            yield
        except ImportError as error:
            raise UserError(
                f"train.tracker '{tracker}' cannot be used: {error}. Install it, or set train.tracker=none."
            ) from error
        except OSError as error:
            if not _is_network_error(error):
                raise
            raise UserError(
                f"train.tracker '{tracker}' cannot be reached: {error}. What was saved is kept: repeat the command "
                "with --resume later."
            ) from error
        except ValueError as error:
            raise UserError(
                f"train.tracker '{tracker}' cannot be used: {error}. Correct it, or set train.tracker=none."
            ) from error


def _is_network_error(error: OSError) -> bool:
    """By type first, as some have an errno that means something else on a disk; libraries' own types have none."""
    kinds = (ConnectionError, TimeoutError, ssl.SSLError, socket.gaierror)
    return isinstance(error, kinds) or error.errno is None or error.errno in _NETWORK_ERRNOS


_ROWS = 15  # epochs in view
_SECONDS_BETWEEN_LINES = 30.0
_WORTH_SAYING = 10.0  # seconds: a training that is longer says so at its start
_RECENT = 50  # steps from which the remaining time is estimated
_TRIAL = 3  # the first steps, after which the time of the training is known


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


@dataclass
class ProgressTable:
    steps: int
    epochs: int
    shown: bool = True
    live: Live | None = None
    pixels_per_unit: float = 1.0  # of the attack's eps, at most
    validation: float = 0.0  # its likely time, as a part of that of all steps
    step: int = 0
    row: Mapping[str, float] = field(default_factory=dict)
    seen: list[Mapping[str, float]] = field(default_factory=list)  # this epoch's steps
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    rows: deque[tuple[str, ...]] = field(default_factory=lambda: deque(maxlen=_ROWS))
    last_line: float = field(default_factory=time.monotonic)

    def add_step(self, step: int, row: Mapping[str, float], seconds: float) -> None:
        self.step, self.row = step, row
        self.seen.append(row)
        self.seconds.append(seconds)
        if len(self.seconds) == _TRIAL and (likely := self._seconds_left()) > _WORTH_SAYING:
            parts = f"steps {duration(likely)}, validation {duration(self.validation * likely)}"
            whole = duration((1 + self.validation) * likely)
            self.note(f"training: likely {whole}, by its first {_TRIAL} steps ({parts}), without an audit after it")
        if self.live is not None:
            self.live.update(self._render())
        elif self.shown and time.monotonic() - self.last_line > _SECONDS_BETWEEN_LINES:
            self._line(f"step {step}/{self.steps}, {self._now()}, {self._left()} left")

    def add_epoch(self, epoch: int, row: Mapping[str, float], best: bool) -> None:
        clean, robust = row.get("validation_clean"), row.get("validation_robust")
        mark = "best" if best else ""
        loss = self._mean("loss")
        shown_loss = "" if loss is None else f"{loss:.3f}"
        self.rows.append((f"{epoch + 1}/{self.epochs}", shown_loss, _share(clean), _share(robust), mark))
        if self.live is not None:
            self.live.update(self._render())
        elif self.shown:
            held_out = f", held out: clean {_share(clean)}" if clean is not None else ""
            held_out += f", robust {_share(robust)}" if robust is not None else ""
            self._line(f"epoch {epoch + 1}/{self.epochs}: {self._now()}{held_out}{f' ({mark})' if mark else ''}")
        self.seen.clear()

    def note(self, message: str) -> None:
        if self.live is not None:
            self.live.console.print(message, markup=False, highlight=False)
        elif self.shown:
            self._line(message)

    def _mean(self, name: str) -> float | None:
        """The mean over the steps of this epoch so far."""
        values = [row[name] for row in self.seen if name in row]
        return sum(values) / len(values) if values else None

    def _now(self) -> str:
        eps, loss, accuracy = self.row.get("eps", 0.0), self._mean("loss"), self._mean("accuracy")
        seen = "no loss yet" if loss is None else f"loss {loss:.3f}"
        seen += "" if accuracy is None else f", accuracy in training {_share(accuracy)}"
        return seen + (f", eps {self._budget(eps)}" if eps else "")

    def _budget(self, eps: float) -> str:
        text = f"{255 * eps:.3g}/255"
        if self.pixels_per_unit == 1:
            return text
        return f"{text} in normalized units, at most {255 * eps * self.pixels_per_unit:.3g}/255 in pixels"

    def _seconds_left(self) -> float:
        """By the recent steps, without the slowest, such as the first one, which allocates memory."""
        usual = sorted(self.seconds)[: -1 if len(self.seconds) > 1 else None]
        return (self.steps - self.step) * sum(usual) / len(usual) if usual else 0.0

    def _left(self) -> str:
        return _span(self._seconds_left())

    def _line(self, text: str) -> None:
        self.last_line = time.monotonic()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def _render(self) -> RenderableType:
        table = Table("epoch", "loss", "clean, held out", "robust, held out", "", box=None, pad_edge=False)
        for over in self.rows:
            table.add_row(*over)
        bar = ProgressBar(total=self.steps, completed=self.step, width=40)
        return Group(table, bar, Text(f"step {self.step}/{self.steps}, {self._now()}, {self._left()} left"))


@contextmanager
def open_progress_table(
    steps: int, epochs: int, shown: bool, pixels_per_unit: float = 1.0, validation: float = 0.0
) -> Iterator[ProgressTable]:
    """A progress table for one process; in a terminal it is redrawn four times a second."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield ProgressTable(steps, epochs, shown, pixels_per_unit=pixels_per_unit, validation=validation)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield ProgressTable(steps, epochs, shown, live, pixels_per_unit, validation)


@dataclass
class ImagePasses:
    """Forward passes, most of which have a backward pass; an image that passes twice counts twice."""

    count: int = 0


@contextmanager
def count_image_passes(model: nn.Module) -> Iterator[ImagePasses | None]:
    """Count inside the block, at the first transformer block, which adapters and heads all use; None if it has none."""
    try:
        first = blocks_of(model)[0].module
    except (UserError, IndexError):
        yield None
        return
    passes = ImagePasses()

    def count(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        tokens: Tensor = inputs[0]
        passes.count += len(tokens)

    handle = first.register_forward_pre_hook(count)
    try:
        yield passes
    finally:
        handle.remove()
