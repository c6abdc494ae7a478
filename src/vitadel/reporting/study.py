"""What the report of a study consists of, and how it reads the arrays that a study left in its folder."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitadel.errors import UserError
from vitadel.reporting.cells import Table
from vitadel.reporting.figures import Picture
from vitadel.reporting.read_runs import Array, Run

__all__ = ["Study", "Told", "arrays_of"]

Told = Mapping[str, Any]
"""The field `study` of the results."""


@dataclass(frozen=True)
class Study:
    """How a study is told: in a sentence, a figure with a caption, tables, and remarks below them.

    Names of tables are not needed: their files are called after the study.
    """

    title: str
    caption: str
    sentence: Callable[[Told], str]
    draw: Callable[[Run], Picture | None]
    tables: Callable[[Told], Sequence[Table]]
    remarks: Callable[[Told], Sequence[str]] = lambda told: ()


def arrays_of(run: Run) -> dict[str, Array]:
    """What is in the folder's `study.npz`; nothing if the study left none."""
    path = run.path / "study.npz"
    if not path.exists():
        return {}
    try:
        # Through the opened file, because numpy does not close one that turns out to be damaged.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read: {error}. Run the study again, or leave it out of the report."
        ) from error
