"""The whole state of a training in one file, written atomically: the old state or the new one is there, always."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitadel.errors import Mistake
from vitadel.runtime.rundir import write_atomically
from vitadel.runtime.secrets import write_secret

__all__ = ["read_state", "state_file", "write_state"]


def state_file(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def write_state(folder: Path, state: Mapping[str, Any], secret: bool = False) -> None:
    """With `secret`, for the owner's eyes only."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write = write_secret if secret else write_atomically
    write(state_file(folder), buffer.getvalue())


def read_state(folder: Path) -> dict[str, Any] | None:
    """On the CPU, from where everything finds its own device; None if the training has not saved anything yet."""
    path = state_file(folder)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise Mistake(
            f"{path} cannot be read ({str(error).splitlines()[0]}). Take it away to start this training anew."
        ) from error
    return state
