"""The run folder: everything a run leaves behind, written atomically, and found again after kill -9."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not a Unix: nobody is kept from working in a folder twice
    fcntl = None  # type: ignore[assignment]

from vitadel.errors import UserError
from vitadel.version import __version__

__all__ = ["RunFolder", "append", "disk_errors_reported", "open_run", "write_atomically", "write_json"]

_COMMAND = "command.json"
_PARTIAL = "partial"

_Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Either the old file or the whole new one is there, whatever happens: temporary file, fsync, rename.

    Until it has its `mode`, only its owner can read it.
    """
    with disk_errors_reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def append(path: Path, text: str) -> None:
    """Add to a file; what a kill leaves half written is for the reader to recognise."""
    with disk_errors_reported(path), path.open("a") as file:
        file.write(text)


@contextmanager
def disk_errors_reported(path: Path) -> Iterator[None]:
    """Around what writes `path`: a full disk, or one that cannot be written to, is not our fault."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left on the disk while writing {path}. What was finished before is kept: free some space "
                "and go on with the same command and --resume."
            ) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose another folder with --out.") from error


def write_json(path: Path, value: object) -> None:
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


@dataclass(frozen=True)
class RunFolder:
    """One run's folder. `partial/` holds finished pieces of an unfinished run and goes away with `finish`."""

    path: Path

    def piece(self, stage: str, number: int) -> Path:
        return self.path / _PARTIAL / re.sub(r"[^\w.-]+", "_", stage) / f"{number:06d}.npz"

    def finish(self) -> None:
        shutil.rmtree(self.path / _PARTIAL, ignore_errors=True)
        _let_go(self.path)

    @property
    def complete(self) -> bool:
        try:
            return bool(json.loads((self.path / "results.json").read_text())["complete"])
        except (OSError, ValueError, KeyError, TypeError):
            return False


def _new_folder(verb: str, target: str) -> Path:
    slug = re.sub(r"[^\w.-]+", "-", target).strip("-.")[-40:] or "model"
    name = f"{verb}-{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{again}" for again in itertools.count(2)))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _read_command(path: Path) -> dict[str, Any] | None:
    try:
        command = json.loads((path / _COMMAND).read_text())
    except (OSError, ValueError):
        return None
    return command if isinstance(command, dict) and "verb" in command and "settings" in command else None


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], telling: Collection[str]) -> list[str]:
    keys = sorted((old.keys() | new.keys()) - set(telling))
    return [f"{k}: was {old.get(k)!r}, now {new.get(k)!r}" for k in keys if old.get(k) != new.get(k)]


def _unfinished(verb: str, settings: Mapping[str, Any], telling: Collection[str], translate: _Translate) -> Path | None:
    """The newest unfinished run of exactly this command below runs/."""
    candidates = sorted(Path("runs").glob(f"{verb}-*/{_COMMAND}"), key=lambda p: p.stat().st_mtime, reverse=True)
    for file in candidates:
        command = _read_command(file.parent)
        if command is None or command["verb"] != verb:
            continue
        if _differences(translate(command["settings"]), settings, telling):
            continue
        if not RunFolder(file.parent).complete:
            return file.parent
    return None


def open_run(
    verb: str,
    target: str,
    settings: Mapping[str, Any],
    *,
    out: Path | None,
    resume: bool,
    argv: list[str],
    telling: Collection[str] = (),
    translate: _Translate = dict,
) -> RunFolder:
    """Create the folder of a run, or find it again to go on; never overwrite another run.

    `settings` is everything that decides the result: a resumed run must agree in all of it. Those called `telling` only
    tell something, here or in runs of earlier versions. `translate` gives recorded settings of earlier versions
    the names of this one.
    """
    settings = json.loads(json.dumps(settings))  # as it will be read back, so that comparisons are fair
    path = out
    if path is None:
        path = (_unfinished(verb, settings, telling, translate) if resume else None) or _new_folder(verb, target)
    if path.is_file():
        raise UserError(f"{path} is a file; --out takes a folder that is new or holds a run to go on with")
    if path.is_dir():
        for torn in path.glob(f".{_COMMAND}.*"):  # a life that was killed while it wrote its first file
            torn.unlink(missing_ok=True)
    if path.is_dir() and any(path.iterdir()):
        _check_same_run(path, verb, settings, resume, telling, translate)
        if not RunFolder(path).complete:
            _hold(path)
        return RunFolder(path)
    command = {"verb": verb, "argv": argv, "settings": settings, "version": __version__}
    write_json(path / _COMMAND, command)
    _hold(path)
    return RunFolder(path)


_held: dict[str, int] = {}
"""Folders that this process works in. The system lets go of them when the process ends, however it ends."""


def _hold(path: Path) -> None:
    """Work in the folder alone; a `UserError` if another process does. In this process it may be opened again."""
    key = os.path.realpath(path)
    if fcntl is None or key in _held:
        return
    handle = os.open(key, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another process is working in {path}; nothing was written. Wait until it ends, or choose another --out."
        ) from None
    except OSError:  # a file system without locks
        os.close(handle)
        return
    _held[key] = handle


def _let_go(path: Path) -> None:
    handle = _held.pop(os.path.realpath(path), None)
    if handle is not None:
        os.close(handle)


def _check_same_run(
    path: Path, verb: str, settings: Mapping[str, Any], resume: bool, telling: Collection[str], translate: _Translate
) -> None:
    command = _read_command(path)
    if command is None:
        raise UserError(f"{path} is not empty and not a run folder; nothing was written. Choose another --out.")
    if command["verb"] != verb:
        raise UserError(
            f"{path} holds a run of 'vitadel {command['verb']}', not of 'vitadel {verb}'; nothing was written. "
            "Choose another --out."
        )
    if not resume:
        state = "a finished" if RunFolder(path).complete else "an unfinished"
        raise UserError(f"{path} already holds {state} run; nothing was written. Add --resume or choose another --out.")
    changed = _differences(translate(command["settings"]), settings, telling)
    if changed:
        raise UserError(
            f"{path} was begun with other settings, so it cannot go on; nothing was written.\n  "
            + "\n  ".join(changed)
            + "\nUse the old settings, or another --out for the new ones."
        )
