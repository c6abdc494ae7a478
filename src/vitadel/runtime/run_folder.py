"""Run folders: files are written atomically, and a run that was killed can be resumed."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

try:
    import fcntl
except ImportError:  # not a Unix: folders are not locked
    fcntl = None  # type: ignore[assignment]

from vitadel.errors import UserError
from vitadel.runtime.safe_reading import ARRAY_ERRORS, parse_json_object, read_text_file
from vitadel.version import __version__

SCHEMA = 1
"""The version of the fields of results.json."""

_COMMAND = "command.json"
_PARTIAL = "partial"
SHARDS = "shards"
"""The folder, inside that of a run, with a folder for each shard of it."""
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")  # the names that `write_atomically` gives before it renames

BatchRecord = dict[str, np.ndarray]
"""What is kept of a finished batch."""

Translate = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file as a whole or not at all: temporary file (readable by its owner only), fsync, chmod, rename.

    A link stays, and the file that it leads to is replaced. Devices and pipes are refused: a rename would remove them.
    """
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it is a folder, a device or a pipe. Give the name of a file.")
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
    """Append text to a file; after a kill its last line may be incomplete."""
    with disk_errors_reported(path), path.open("a") as file:
        file.write(text)


@contextmanager
def disk_errors_reported(path: Path) -> Iterator[None]:
    """Turn disk errors while `path` is written into a `UserError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no space left on the disk while writing {path}. Finished work is kept: free some "
                "space and run the same command with --resume."
            ) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}. Choose another folder with --out.") from error


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # File names that are not UTF-8 have lone surrogates; written as JSON's own escapes they read back as they were.
    write_atomically(path, f"{text}\n".encode(errors="backslashreplace"))


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. `partial/` holds the finished batches of an unfinished run; `finish` removes it."""

    path: Path

    def batch_file(self, stage: str, number: int) -> Path:
        return self.path / _PARTIAL / re.sub(r"[^\w.-]+", "_", stage) / f"{number:06d}.npz"

    def shards(self) -> tuple[RunFolder, ...]:
        """The folders of the shards of this run, whose finished batches belong to it."""
        return tuple(RunFolder(path) for path in sorted((self.path / SHARDS).glob("*-of-*")))

    def finish(self) -> None:
        shutil.rmtree(self.path / _PARTIAL, ignore_errors=True)
        self.unlock()

    def unlock(self) -> None:
        handle = _locks.pop(os.path.realpath(self.path), None)
        if handle is not None:
            os.close(handle)

    @property
    def complete(self) -> bool:
        try:
            return bool(self._content()["complete"])
        except (UserError, KeyError):
            return False

    def results(self) -> dict[str, Any]:
        """The content of results.json; `UserError` if there is none that can be read, or it only says that it is."""
        path, results = self.path / "results.json", self._content()
        check_schema(results, path)
        if results.get("complete") and "seed" not in results:
            raise UserError(f"'{path}' says that the run is complete and has no results. Remove it and resume the run.")
        return results

    def _content(self) -> dict[str, Any]:
        path = self.path / "results.json"
        return parse_json_object(read_text_file(path, "the results"), f"'{path}'")


def check_schema(results: Mapping[str, Any], path: Path) -> None:
    """Refuse results of a newer version, whose fields may mean something else, and such that no version wrote.

    Trainings without test data had no schema at first.
    """
    schema = results.get("schema", SCHEMA)
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise UserError(
            f"'{path}' has schema {schema!r}, so Vitadel did not write it as it is. Run the command again with a new "
            "--out."
        )
    if schema > SCHEMA:
        raise UserError(f"'{path}' has schema {schema}; this version reads schema {SCHEMA}. Update vitadel.")


@dataclass(frozen=True)
class FolderCache:
    """Files in a run folder, which survive kill -9 and are seen by the other processes; also those of its shards."""

    folder: RunFolder
    shards: tuple[RunFolder, ...] = ()

    def find(self, stage: str, number: int) -> BatchRecord | None:
        for folder in (self.folder, *self.shards):
            path = folder.batch_file(stage, number)
            if not path.is_file():  # nor a pipe, which would block
                continue
            # From an open file, because numpy does not close one that turns out to be damaged.
            with (
                suppress(*ARRAY_ERRORS),  # a missing or damaged record is computed again
                path.open("rb") as file,
                np.load(file, allow_pickle=False) as arrays,
            ):
                return {name: arrays[name] for name in arrays.files}
        return None

    def save(self, stage: str, number: int, record: BatchRecord) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **record)  # type: ignore[arg-type]
        write_atomically(self.folder.batch_file(stage, number), buffer.getvalue())


@dataclass(frozen=True)
class Command:
    """What command.json records of a run.

    `settings` is everything that decides the result: a resumed run must agree in all of it except the keys in
    `not_compared`. `translate` gives recorded settings of earlier versions the names of this one. `opening` says how
    model and data were opened (see `runtime.opening`).
    """

    verb: str
    settings: Mapping[str, Any]
    argv: Sequence[str] = ()
    opening: Mapping[str, Any] | None = None
    not_compared: Collection[str] = ()
    translate: Translate = dict

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """The settings that differ from the recorded ones, each as a line of text."""
        old, new = self.translate(recorded), json.loads(json.dumps(self.settings))  # as it will be read back
        keys = sorted((old.keys() | new.keys()) - set(self.not_compared))
        return [f"{k}: was {old.get(k)!r}, now {new.get(k)!r}" for k in keys if old.get(k) != new.get(k)]

    def write(self, folder: Path) -> None:
        how = {} if self.opening is None else {"opening": dict(self.opening)}
        recorded = {"verb": self.verb, "argv": list(self.argv), "settings": dict(self.settings), **how}
        write_json(folder / _COMMAND, {**recorded, "version": __version__})


def read_command(folder: Path) -> dict[str, Any] | None:
    """The content of command.json; None if the folder holds no run."""
    try:
        command = parse_json_object(read_text_file(folder / _COMMAND, "the command"), _COMMAND)
    except UserError:
        return None
    is_run = isinstance(command.get("verb"), str) and isinstance(command.get("settings"), dict)
    return command if is_run else None


def open_run(command: Command, name: str, *, out: Path | None, resume: bool) -> RunFolder:
    """Create the run's folder (below runs/, named after `name`, unless `out` is given), or find it again to resume.

    Another run is never overwritten, and another process that works in the folder is an error.
    """
    path = out or (_find_unfinished(command) if resume else None) or _new_folder(command.verb, name)
    if path.is_file():
        raise UserError(f"{path} is a file; --out takes a new folder, or one with a run to resume")
    with disk_errors_reported(path):
        path.mkdir(parents=True, exist_ok=True)
    locked = _lock(path)  # before anything in it is looked at or removed: another process may be about to write
    folder = RunFolder(path)
    try:
        with disk_errors_reported(path):
            _remove_temporary_files(path)
        if any(path.iterdir()):
            _check_same_run(path, command, resume)
        else:
            command.write(path)
    except BaseException:
        if locked:
            folder.unlock()
        raise
    if folder.complete:
        folder.finish()  # also what a process left that was killed right after its results
    return folder


def announce_run(command: Command, name: str, out: Path) -> None:
    """Create the folder that several runs share, or check that it is of the same run; it stays unlocked.

    The runs write into folders of their own below it, which nothing here touches.
    """
    for attempt in range(60):
        try:
            if (out / _COMMAND).is_file():
                _check_same_run(out, command, resume=True)
            else:
                open_run(command, name, out=out, resume=True).unlock()
        except UserError as error:
            if "another process" not in str(error) or attempt == 59:
                raise
            time.sleep(1.0)
        else:
            return


def _remove_temporary_files(path: Path) -> None:
    """Remove what a killed process left of `write_atomically`, where this is a run folder or nothing else is in it.

    Other processes may be writing in the folders of shards; each of these is cleaned when its shard is opened.
    """
    is_run = (path / _COMMAND).is_file()
    found = path.rglob(".*") if is_run else path.glob(".*")  # a run also writes into folders of its own
    torn = [file for file in found if _TEMPORARY.fullmatch(file.name) and file.is_file()]
    torn = [file for file in torn if SHARDS not in file.relative_to(path).parts]
    if is_run or len(torn) == len(list(path.iterdir())):
        for file in torn:
            file.unlink(missing_ok=True)


def _new_folder(verb: str, name: str) -> Path:
    slug = re.sub(r"[^\w.-]+", "-", name).strip("-.")[-40:] or "model"
    folder = f"{verb}-{slug}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([folder], (f"{folder}-{again}" for again in itertools.count(2)))
    return next(path for path in (Path("runs") / each for each in names) if not path.exists())


def _find_unfinished(command: Command) -> Path | None:
    """The newest unfinished run of exactly this command below runs/."""
    files = sorted(Path("runs").glob(f"{command.verb}-*/{_COMMAND}"), key=lambda p: p.stat().st_mtime, reverse=True)
    for folder in (file.parent for file in files):
        recorded = read_command(folder)
        if recorded is None or recorded["verb"] != command.verb or command.differences(recorded["settings"]):
            continue
        if not RunFolder(folder).complete:
            return folder
    return None


def _check_same_run(path: Path, command: Command, resume: bool) -> None:
    recorded = read_command(path)
    if recorded is None:
        raise UserError(f"{path} is not empty and not a run folder; nothing was written. Choose a different --out.")
    if recorded["verb"] != command.verb:
        raise UserError(
            f"{path} holds a run of 'vitadel {recorded['verb']}', not of 'vitadel {command.verb}'; nothing was "
            "written. Choose a different --out."
        )
    if not resume:
        state = "a finished" if RunFolder(path).complete else "an unfinished"
        raise UserError(
            f"{path} already holds {state} run; nothing was written. Add --resume or choose a different --out."
        )
    changed = command.differences(recorded["settings"])
    if changed:
        raise UserError(
            f"{path} was started with different settings, so it cannot be resumed; nothing was written.\n  "
            + "\n  ".join(changed)
            + "\nUse the old settings, or a different --out for the new ones."
        )


_locks: dict[str, int] = {}
"""Folders locked by this process. The system unlocks them when the process ends, however it ends."""


def _lock(path: Path) -> bool:
    """Lock the folder against other processes, and return whether that was done: this process may have it already."""
    key = os.path.realpath(path)
    if fcntl is None or key in _locks:
        return False
    handle = os.open(key, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(
            f"another process is working in {path}; nothing was written. Wait until it ends, or choose a different "
            "--out."
        ) from None
    except OSError:  # a file system without locks
        os.close(handle)
        return False
    _locks[key] = handle
    return True
