"""The program called in this process, as a person would from a shell: a new process takes seconds to import torch."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import chdir, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from vitadel.cli.main import main

__all__ = ["Said", "call", "vitadel"]


@dataclass(frozen=True)
class Said:
    stdout: str
    stderr: str


def vitadel(*words: str, cwd: Path | None = None, code: int = 0, columns: int = 200) -> Said:
    """What the program prints; it must end with the exit code. An exception that it lets out is the test's, too."""
    ended, out, err = call(*words, cwd=cwd, columns=columns)
    assert ended == code, f"ended with {ended}: {err or out}"
    return Said(out, err)


def call(*words: object, cwd: Path | None = None, columns: int = 200) -> tuple[object, str, str]:
    """The exit code, and what the program prints to standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    ended = _run([str(word) for word in words], out, err, cwd, columns)
    return ended, out.getvalue(), err.getvalue()


def _run(words: Sequence[str], out: io.StringIO, err: io.StringIO, cwd: Path | None, columns: int) -> object:
    place = nullcontext() if cwd is None else chdir(cwd)
    with (
        place,
        patch("sys.argv", ["vitadel", *words]),
        patch.dict(os.environ, {"COLUMNS": str(columns)}),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    return 0
