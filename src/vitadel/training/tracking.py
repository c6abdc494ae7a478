"""Trackers by name, through accelerate: what they are told of a run, and what is told when they cannot write."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from vitadel.errors import UserError
from vitadel.runtime.run_folder import disk_errors_reported

__all__ = ["begin_tracking", "end_tracking", "track"]

_FOLDER = "tracker"
_OF_NETWORKS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.EADDRNOTAVAIL}


def begin_tracking(accelerator: Accelerator, tracker: str, settings: Mapping[str, Any], folder: Path) -> None:
    with _trouble_told(tracker, folder):
        if tracker in ("tensorboard", "all"):
            accelerator.init_trackers(_FOLDER)  # lies in the run's folder, beside recipe.yaml
        elif tracker != "none":  # elsewhere, so that the run must say itself what it is
            accelerator.init_trackers("vitadel", config={key: str(value) for key, value in settings.items()})


def track(accelerator: Accelerator, tracker: str, row: Mapping[str, float], step: int, folder: Path) -> None:
    """A full disk may be met here first: TensorBoard writes when it likes, and complains at the next call."""
    with _trouble_told(tracker, folder):
        accelerator.log(dict(row), step=step)


def end_tracking(accelerator: Accelerator, tracker: str, folder: Path) -> None:
    """Not by `end_training`, which would send the other processes away before the audit."""
    with _trouble_told(tracker, folder):
        for each in accelerator.trackers:
            each.finish()


@contextmanager
def _trouble_told(tracker: str, folder: Path) -> Iterator[None]:
    with disk_errors_reported(folder / _FOLDER):
        try:
            yield
        except ImportError as error:
            raise UserError(
                f"train.tracker '{tracker}' cannot be used: {error}. Install it, or set train.tracker=none."
            ) from error
        except OSError as error:
            if not _of_a_network(error):
                raise
            raise UserError(
                f"train.tracker '{tracker}' cannot be reached: {error}. What was saved before is kept: go on with the "
                "same command and --resume when it can."
            ) from error
        except ValueError as error:
            raise UserError(
                f"train.tracker '{tracker}' cannot be used: {error}. Mend that, or set train.tracker=none."
            ) from error


def _of_a_network(error: OSError) -> bool:
    """By its kind first: some of them have numbers that mean something else on a disk. Libraries raise kinds of their
    own, without a number."""
    kinds = (ConnectionError, TimeoutError, ssl.SSLError, socket.gaierror)
    return isinstance(error, kinds) or error.errno is None or error.errno in _OF_NETWORKS
