"""The program, or a function, in processes of their own that have torch and vitadel already.

They are forked from a server that has imported vitadel and computed nothing; a new interpreter takes seconds to import
torch. What depends on a new interpreter, or on the launcher itself, uses `subprocess`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pkgutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import torch
from torch.distributed import TCPStore

from command_line import Said

__all__ = ["Running", "program", "run_together", "signaled_at", "start"]

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = ("cli.main", "cli.audit", "cli.harden", "diagnosis.precheck", "threat_levels.run", "reporting.kinds.audit")
_CONTEXT.set_forkserver_preload([f"vitadel.{name}" for name in _IMPORTED])
_LIMIT = 600


@dataclass(frozen=True)
class Running:
    process: BaseProcess
    prints: tempfile.TemporaryDirectory[str]

    def finish(self, code: int | None = 0) -> Said:
        """Wait for the end, which must be with the exit code (minus the number of a signal; None: any but 0)."""
        self.process.join(_LIMIT)
        ended, (out, err) = self.process.exitcode, _files(self.prints.name)
        said = Said(out.read_text(), err.read_text())
        if ended is None:
            self.process.kill()
        assert ended == code if code is not None else ended, f"ended with {ended}: {said.stderr or said.stdout}"
        self.prints.cleanup()
        return said


def start(
    work: Callable[..., object], *given: object, threads: int = 1, environment: Mapping[str, str] | None = None
) -> Running:
    """Call a function of a module in a new process."""
    prints = tempfile.TemporaryDirectory()
    for file in _files(prints.name):
        file.touch()
    process = _CONTEXT.Process(target=_work, args=(work, given, threads, dict(environment or {}), prints.name))
    process.start()
    return Running(process, prints)


def run_together(
    work: Callable[..., object],
    *given: object,
    processes: int = 2,
    code: int | None = 0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Call a function in several processes as torchrun starts them; what they print as errors. The code is of all."""
    # Of this process, as torchrun has it: a port that is only looked for may be taken before it is used.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    shared |= {"LOCAL_WORLD_SIZE": str(processes), **(environment or {})}
    running = [start(work, *given, environment=shared | rank) for rank in ranks]
    return "\n".join(each.finish(code).stderr for each in running)


def program(*words: str) -> None:
    """`vitadel` with these words, to be started."""
    from vitadel.cli.main import main

    with patch("sys.argv", ["vitadel", *words]):
        main()


def signaled_at(number: int, place: str, call: int, work: Callable[..., object], *given: object) -> None:
    """Call the work, and send this process a signal when it calls the function of this dotted name for the n-th time.

    To be started. A signal from outside may come too late on a busy machine.
    """
    real, calls = pkgutil.resolve_name(place), itertools.count(1)

    def counted(*arguments: object, **named: object) -> object:
        if next(calls) == call:
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    with patch(place, counted):
        work(*given)


def _files(folder: str) -> tuple[Path, Path]:
    return Path(folder) / "out", Path(folder) / "err"


def _work(
    work: Callable[..., object], given: tuple[object, ...], threads: int, environment: Mapping[str, str], prints: str
) -> None:
    code: object = 1
    try:
        for stream, file in zip((sys.stdout, sys.stderr), _files(prints), strict=True):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), stream.fileno())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        torch.set_num_threads(threads)
        work(*given)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
