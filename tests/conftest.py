"""Puts this folder on the path, so that tests share their small models: `from vits import ...`.

What all tests would pay for again and again is paid once: building the parser of the program from its functions, and
the garbage collector's walk over the modules and the collected tests, which are never garbage. It rests while these
are made, and starts less often than by default, as a test leaves little.
"""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path

import typer.main
import typer.testing

sys.path.insert(0, str(Path(__file__).parent))
typer.main.get_command = typer.testing._get_command = functools.cache(typer.main.get_command)
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what libraries look for at the end is collected as ever
