"""Metrics of a training: the lines of metrics.jsonl, and trackers such as TensorBoard, through accelerate."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vitadel.errors import UserError
from vitadel.runtime.run_folder import append, disk_errors_reported, write_atomically

__all__ = ["Metrics", "end_tracking", "start_tracking", "track"]

_FOLDER = "tracker"
_NETWORK_ERRNOS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}


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
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if len(kept) != len(lines):
            write_atomically(self.path, "".join(kept).encode())
        rows: list[dict[str, float]] = [json.loads(line) for line in kept]
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
