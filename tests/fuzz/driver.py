"""Give the program a hostile input, in this process, and check that it ends as it should."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import material

SECONDS = 20  # of processor time
WALL_SECONDS = 600  # for what blocks without computing, also on a busy machine
BYTES = 4 * 2**30  # more than the process has before

_DELETE = "<delete>"
_HALF_WRITTEN = re.compile(r"\..+\.[a-z0-9_]{8}")


@dataclass(frozen=True)
class Edit:
    """A change of the file `name` of the material.

    With `place`, the value there in its JSON (of a safetensors file: in its header) becomes `value`, or is removed.
    Without, `value` (text in latin-1) replaces the bytes from `start` on, of which there are `length`.
    """

    name: str
    place: tuple[str | int, ...] | None = None
    value: Any = _DELETE
    start: int = 0
    length: int = 0

    def apply(self, folder: Path) -> None:
        path = folder / self.name
        content = path.read_bytes()
        if self.place is None:
            replacement = str(self.value).encode("latin-1", "replace")
            changed = content[: self.start] + replacement + content[self.start + self.length :]
        elif self.name.endswith(".safetensors"):
            size = struct.unpack("<Q", content[:8])[0]
            header = json.dumps(self._changed(json.loads(content[8 : 8 + size]))).encode()
            changed = struct.pack("<Q", len(header)) + header + content[8 + size :]
        else:
            changed = json.dumps(self._changed(json.loads(content))).encode()
        path.write_bytes(changed)

    def _changed(self, document: Any) -> Any:
        """The document with the change; metadata of safetensors files is JSON in a string, which is entered."""
        place = self.place or ()
        if not place:
            return self.value
        first, rest = place[0], place[1:]
        if isinstance(document, str) and document[:1] in ("{", "[") and len(document) > 1:
            return json.dumps(self._changed(json.loads(document)))
        if not isinstance(document, dict | list):
            return document  # an edit before this one replaced what was there
        below = Edit(self.name, rest, self.value)
        if not rest and self.value == _DELETE:
            if isinstance(document, dict):
                return {key: value for key, value in document.items() if key != first}
            return [value for row, value in enumerate(document) if row != first]
        if isinstance(document, dict):
            inside = document.get(first)
            if isinstance(inside, str) and rest and inside[:1] in "{[":
                return {**document, first: json.dumps(below._changed(json.loads(inside)))}
            return {**document, first: below._changed(inside) if rest else self.value}
        return [
            (below._changed(value) if rest else self.value) if row == first else value
            for row, value in enumerate(document)
        ]


@dataclass(frozen=True)
class Replacement:
    """What the file or folder `name` becomes: no file at all, or, by "copy", another one in the folder `to`."""

    name: str
    what: str
    to: str = ""

    def apply(self, folder: Path) -> None:
        path = folder / self.name
        if self.what == "copy":
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / self.to)
            return
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if self.what == "pipe":
            os.mkfifo(path)
        elif self.what == "device":
            path.symlink_to("/dev/zero")
        elif self.what == "folder":
            path.mkdir()
        elif self.what == "link above":
            path.symlink_to(path.parent)


@dataclass(frozen=True)
class Case:
    """A command line with the files it finds: inputs, a finished run of kind `base`, and `files` of its own.

    `edits` and `replaced` change the first two.
    `works` runs it to its end; otherwise it stops where the work of a run starts. A `wrong` input must be refused.
    """

    words: tuple[str, ...]
    base: str = "inputs"
    edits: tuple[Edit, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    works: bool = False
    wrong: bool = False
    replaced: tuple[Replacement, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a case ended; `code` is "started" if it stopped where the work starts."""

    code: object
    message: str
    seconds: float
    faults: tuple[str, ...]


class _Started(BaseException):
    """Raised where the work of a run would start."""


class _TooLong(BaseException):
    """Raised by the timer."""


def attempt(case: Case) -> Ending:
    """Run the case in a new folder; its faults say how it ended other than promised."""
    place = Path(tempfile.mkdtemp(prefix="case-", dir=material.folder()))
    try:
        return _attempt(case, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _attempt(case: Case, place: Path) -> Ending:
    shutil.copytree(material.inputs(), place, dirs_exist_ok=True)
    if case.base != "inputs":
        shutil.copytree(material.run(case.base), place / "run")
    for edit in case.edits:
        edit.apply(place)
    for each in case.replaced:
        each.apply(place)
    for name, text in case.files:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    before, start = _snapshot(place), time.process_time()
    code, message = _ended(case, place)
    seconds = time.process_time() - start
    return Ending(code, message, seconds, tuple(_faults(case, code, message, before, _snapshot(place))))


def _ended(case: Case, place: Path) -> tuple[object, str]:
    """The exit code, or what happened instead of one, and what was printed on standard error."""
    from vitadel.cli.main import main

    out, err, code = io.StringIO(), io.StringIO(), 0  # type: io.StringIO, io.StringIO, object
    with (
        chdir(place),
        material.tiny_paper(material.inputs()),
        patch("sys.argv", ["vitadel", *case.words]),
        patch.dict(os.environ, {"COLUMNS": "200", "HF_HUB_OFFLINE": "1", "VITADEL_TRUST_CODE": "0"}),
        redirect_stdout(out),
        redirect_stderr(err),
        _stopped_at_work(case.works),
        _limited(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        except _Started:
            code = "started"
        except _TooLong:
            code = f"hang: {''.join(traceback.format_exc(limit=-4))}"
        except BaseException:
            code = f"traceback: {''.join(traceback.format_exc(limit=-6))}"
    return code, err.getvalue()


def _faults(case: Case, code: object, message: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    if code not in (0, 2, 3, 130, "started"):
        yield str(code)
    if "Traceback" in message:
        yield f"a traceback in the message: {message}"
    if code == 2 and not re.search(r"^vitadel: \S|^Usage: ", message, re.MULTILINE):
        yield f"exit code 2 without a message: {message!r}"
    if "Warning: " in message:
        yield f"a warning of a library: {message}"
    if case.wrong and code in (0, "started"):
        yield f"a wrong input was accepted ({code})"
    written = ("--out", "--export", "--summary")
    out = {case.words[row + 1].split("/")[0] for row, word in enumerate(case.words[:-1]) if word in written}
    out |= {f"{name}-jobs" for name in out}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    resumed = "--resume" in case.words or case.words[:1] in (("report",), ("merge",))
    outside = sorted(
        name for name in changed if name.split("/")[0] not in {"runs", *out, *(["run"] if resumed else [])}
    )
    if outside and case.words[:2] not in (("recipes", "copy"), ("recipes", "new")) and outside != ["leaderboard.html"]:
        yield f"changed outside --out: {outside[:3]}"
    torn = [name for name in changed & after.keys() if _HALF_WRITTEN.fullmatch(Path(name).name)]
    if torn and not any(edit.name in torn for edit in case.edits):
        yield f"left half-written: {torn[:3]}"


def _snapshot(place: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for root, _, names in os.walk(place):
        for name in names:
            path = Path(root) / name
            with contextlib.suppress(OSError):
                status = path.lstat()
                found[str(path.relative_to(place))] = (status.st_size, status.st_mtime_ns)
    return found


@contextmanager
def _stopped_at_work(works: bool) -> Iterator[None]:
    """Unless the case works, stop once the run folder is open, or before what is costly without one."""
    from vitadel.evaluation.audit import audit_shards
    from vitadel.evaluation.engine import run as engine
    from vitadel.runtime.run_folder import open_run

    def open_and_stop(*given: Any, **named: Any) -> Any:
        folder = open_run(*given, **named)
        if folder.complete:
            return folder
        folder.unlock()
        raise _Started

    def stop(*given: Any, **named: Any) -> Any:
        raise _Started

    with ExitStack() as stack:
        if not works:
            for module in (engine, audit_shards):
                stack.enter_context(patch.object(module, "open_run", open_and_stop))
            stack.enter_context(patch("vitadel.evaluation.audit.audit_plan.plan_audit", stop))
            stack.enter_context(patch("vitadel.training.training_cost.plan_training", stop))
            stack.enter_context(patch("vitadel.playground.app.serve", stop))
            stack.enter_context(patch("vitadel.evaluation.selftest.selftest", stop))
        yield


@contextmanager
def _limited() -> Iterator[None]:
    """Limits of processor time, time and memory."""

    def end(number: int, frame: object) -> None:
        raise _TooLong

    old = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else None
    try:
        if pages is not None:
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES, hard))
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in old.items():
            signal.signal(number, handler)
