"""The whole state of a training in one file, written atomically: the old state or the new one is there, always."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.secrets import read_secret, write_secret
from vitadel.training.recipes.documents import IDLE
from vitadel.training.recipes.old_keys import translate_settings

__all__ = ["check_same_recipe", "clear_torn_files", "read_state", "state_file", "write_state"]

_TORN = (".checkpoint.pt.*", ".metrics.jsonl.*", "weights/.*.safetensors.*")


def state_file(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def write_state(folder: Path, state: Mapping[str, Any], secret: bool = False) -> None:
    """With `secret`, for the owner's eyes only."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write = write_secret if secret else write_atomically
    write(state_file(folder), buffer.getvalue())


def read_state(folder: Path, secret: bool = False) -> dict[str, Any] | None:
    """On the CPU, from where everything finds its own device; None if the training has not saved anything yet.

    With `secret`, a `UserError` if others than the owner could read or change it.
    """
    path = state_file(folder)
    if not path.exists():
        return None
    content = read_secret(path, allow_readable=None) if secret else path.read_bytes()
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise UserError(
            f"{path} cannot be read ({str(error).splitlines()[0]}). Take it away to start this training anew."
        ) from error
    if not isinstance(state, dict) or "step" not in state:
        raise UserError(f"{path} is no checkpoint of `vitadel harden`. Take it away to start this training anew.")
    return state


def check_same_recipe(folder: Path, state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """A `UserError` if the state is that of another recipe, brought here from another folder."""
    theirs = translate_settings(state.get("recipe", settings))
    different = [
        f"{key}: {theirs.get(key)!r} there, {settings.get(key)!r} here"
        for key in sorted((theirs.keys() | settings.keys()) - set(IDLE))
        if theirs.get(key) != settings.get(key)
    ]
    if different:
        raise UserError(
            f"{state_file(folder)} is the checkpoint of another recipe, so this training cannot go on from it; nothing "
            "was changed.\n  " + "\n  ".join(different) + "\nTake it away to start anew, or use another --out."
        )


def clear_torn_files(folder: Path) -> None:
    """Take away what a life that was killed while it wrote had not finished; each may be as large as a checkpoint."""
    for pattern in _TORN:
        for torn in folder.glob(pattern):
            torn.unlink(missing_ok=True)
