"""Runs in processes of their own, disturbed at one of their events: a write, a rename, a read, an optimizer step.

The processes are forked from a server that has imported vitadel and computed nothing. A fork of the tests' own process
would inherit what other tests left there, such as thread pools of torch, which do not survive a fork.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import material
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import vitadel

FAULTS = ("kill", "terminate", "interrupt", "no space", "write error", "read error", "clock")
_SIGNALS = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT}
_ERRORS = {"no space": errno.ENOSPC, "write error": errno.EIO, "read error": errno.EIO}
_WRITES = ("write", "rename", "append")
_PARTED = material.RUNS["shards"]
KINDS = {
    **{kind: words for kind, words in material.RUNS.items() if kind != "shards"},
    "shard": (*_PARTED, *material.PARTS["shards"][0]),
    "merge": ("merge", "../run-shards", "--device", "cpu"),
    "files": (
        *("audit", material.MODEL, "--attacks", "fgsm", "--no-precheck", "--data", "folder:photos"),
        *("--head-classes", "0,1", "--device", "cpu"),
    ),
}
"""All kinds of run; `files` reads its images from a folder, `merge` makes one of two shards."""
_NEEDS = {"compare": "within", "merge": "shards"}
_LARGE_BATCHES = ("harden", "probe", "corrupt", "reproduce", "within", "compare", "shard", "merge")


def words_of(kind: str, out: Path) -> list[str]:
    if kind in _NEEDS:
        material.run(_NEEDS[kind])
    size = "8" if kind == "diagnose" else "2"  # of 16 images, and of 4: two batches
    batches = [] if kind in _LARGE_BATCHES else ["--batch-size", size]
    return [*KINDS[kind], *batches, "--out", str(out)]


def resumed(words: Sequence[str]) -> list[str]:
    """The command that goes on; `merge` does without being asked."""
    return [*words] if words[0] == "merge" else [*words, "--resume"]


def applies(fault: str, event: str) -> bool:
    if fault == "read error":
        return event == "read"
    return event in _WRITES if fault in _ERRORS else event != "read"


def number_of(fault: str, events: Sequence[str]) -> int:
    """At how many of the events the fault can happen."""
    return sum(applies(fault, event) for event in events)


def _moved(clock: Callable[[], float], more: float) -> float:
    return clock() + more


@dataclass
class Injector:
    """Notes all events, and lets `fault` happen at number `place` of those that it applies to; never at 0."""

    fault: str = "kill"
    place: int = 0
    seen: list[str] = field(default_factory=list)

    def event(self, name: str, torn: Callable[[], object] = lambda: None) -> None:
        """`torn` leaves a file as a process does that ends in the middle of writing."""
        self.seen.append(name)
        if not applies(self.fault, name) or number_of(self.fault, self.seen) != self.place:
            return
        if self.fault == "clock":
            self._turn_clocks()
        elif self.fault in _SIGNALS:
            torn()
            os.kill(os.getpid(), _SIGNALS[self.fault])
        else:
            raise OSError(_ERRORS[self.fault], os.strerror(_ERRORS[self.fault]))

    def _turn_clocks(self) -> None:
        """The date goes back or ahead by days; clocks that never go back go ahead, as after a pause."""
        for name, more in (("time", 1e6 if self.place % 2 else -1e6), ("monotonic", 1e5), ("perf_counter", 1e5)):
            setattr(time, name, partial(_moved, getattr(time, name), more))

    def install(self, root: Path) -> None:
        """Watch the files below `root`, all renames and synchronized writes, and the optimizer's steps."""
        replace, fsync, opened, moved = os.replace, os.fsync, io.open, os.rename

        def rename(source: Any, target: Any) -> None:
            self.event("rename")
            replace(source, target)
            self.event("renamed")

        def synchronize(handle: int) -> None:
            self.event("write", lambda: os.ftruncate(handle, os.fstat(handle).st_size // 2))
            fsync(handle)

        def open_file(name: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
            if isinstance(name, str | os.PathLike) and os.path.abspath(name).startswith(str(root)):
                if mode.startswith("a"):
                    self.event("append", lambda: Path(name).write_bytes(Path(name).read_bytes() + b'{"ste'))
                elif mode.startswith("r"):
                    self.event("read")
            return opened(name, mode, *given, **named)

        def move(source: Any, target: Any) -> None:
            self.event("rename")
            moved(source, target)
            self.event("renamed")

        os.replace, os.fsync, os.rename = rename, synchronize, move
        io.open = builtins.open = open_file  # type: ignore[assignment]
        register_optimizer_step_post_hook(lambda *given: self.event("step"))


@dataclass(frozen=True)
class Ended:
    """How a disturbed run ended: its exit code, or minus the signal's number; its events; what it printed as errors."""

    code: int
    events: list[str]
    errors: str


def _modules() -> list[str]:
    """All modules of vitadel but those that need gradio, which no run uses, and the one that runs the command."""
    root = Path(vitadel.__file__).parent
    names = (path.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".") for path in root.rglob("*.py"))
    left_out = ("vitadel.playground", "vitadel.__main__")
    return sorted(name.removesuffix(".__init__") for name in names if not name.startswith(left_out))


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(_modules())


def run_in_child(words: Sequence[str], injector: Injector) -> Ended:
    """Run the command in a new process, which has vitadel and torch already."""
    with tempfile.TemporaryDirectory() as folder:
        errors, events = Path(folder) / "errors", Path(folder) / "events"
        child = _PROCESSES.Process(target=_work, args=(words, injector, material.inputs(), errors, events))
        child.start()
        child.join()
        assert child.exitcode is not None
        return Ended(child.exitcode, events.read_text().split() if events.exists() else [], errors.read_text())


def _work(words: Sequence[str], injector: Injector, inputs: Path, errors: Path, events: Path) -> None:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout, sys.stderr = open(os.devnull, "w"), errors.open("w", buffering=1)  # noqa: SIM115
        from vitadel.cli.main import main

        with chdir(inputs), material.tiny_paper(inputs), patch("sys.argv", ["vitadel", *words]):
            injector.install(inputs.parent)
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except KeyboardInterrupt:
                code = 130
        injector.place = 0
        events.write_text(" ".join(injector.seen))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def timeless(value: Any) -> Any:
    """Results and checkpoints without the fields that hold measured times."""
    if isinstance(value, dict):
        times = ("seconds", "hours", "device_hours")
        kept = {key: entry for key, entry in value.items() if key not in times and not str(key).startswith("seconds_")}
        return {key: timeless(entry) for key, entry in kept.items()}
    return [timeless(entry) for entry in value] if isinstance(value, list) else value


def _values(value: Any) -> str:
    """The values of a checkpoint, in order, exactly."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.cpu().contiguous().view(-1).view(torch.uint8).tolist()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_values(entry)}" for key, entry in value.items()) + "}"
    return f"[{', '.join(map(_values, value))}]" if isinstance(value, list | tuple) else repr(value)


def outcome(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder, results without times; not the report, which shows times, nor the typed words."""
    found = {}
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "report.html"):
        content = path.read_bytes()
        if path.name in ("results.json", "command.json", "time.json"):
            document = json.loads(content)
            document.pop("argv", None)
            content = json.dumps(timeless(document), indent=2).encode()
        elif "partial" in path.parts and path.suffix == ".npz":  # of a shard, which keeps its batches
            with np.load(path) as file:
                arrays = {name: file[name] for name in sorted(file.files) if name != "seconds"}
            content = repr([(name, each.dtype, each.tolist()) for name, each in arrays.items()]).encode()
        elif path.name == "checkpoint.pt":  # equal values may be pickled with other references between them
            content = _values(timeless(torch.load(io.BytesIO(content), weights_only=True))).encode()
        found[str(path.relative_to(folder))] = content
    return found
