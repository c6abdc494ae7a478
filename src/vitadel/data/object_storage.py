"""Data in object storage, through fsspec: `parquet:s3://bucket/test-*.parquet`, also `gs://`, `hf://` and others.

What a URL names is copied once below the folder of data sets, under the same name, and read from there. A file whose
version in the storage has changed is copied again.
"""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.utils import get_protocol

from vitadel.data.files import expand_braces
from vitadel.errors import UserError

Found = TypeVar("Found")

_PACKAGES = {
    "https": "aiohttp",
    "http": "aiohttp",
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "abfs": "adlfs",
    "az": "adlfs",
}
_COPIES, _VERSIONS = "remote", ".versions"
_LOCAL = ("file", "local")
_FIRST_ANSWER, _SILENCE = 15.0, 120.0  # seconds without an answer until a storage is given up, at first and later


def local_copy(url: str, root: Path) -> str:
    """Copy what the URL names, which may have braces and globs, and return the same pattern for the copies.

    What is on this machine is not copied.
    """
    protocol, _, rest = url.partition("://")
    if not rest or ".." in rest.split("/") or "::" in url:
        raise UserError(f"'{url}' is not a URL of files; write e.g. s3://bucket/folder or s3://bucket/test-*.parquet")
    patterns = expand_braces(f"{protocol}://{rest}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols and credentials, by the packages of storages
            storage = _open_storage(url, protocol)
            if protocol in _LOCAL:
                return str(storage._strip_protocol(url))
            return _copy_all(storage, url, patterns, root / _COPIES, protocol)
    except UserError:
        raise
    except Exception as error:  # every storage has exceptions of its own
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UserError(
            f"'{url}' cannot be read ({reason}). Check the name, the network and your credentials for {protocol}."
        ) from error


def _copy_all(storage: Any, url: str, patterns: list[str], copies: Path, protocol: str) -> str:
    home = copies / protocol
    _answered(lambda: storage.exists(_before_globs(patterns[0])), _FIRST_ANSWER)
    listed = _answered(lambda: [path for pattern in patterns for path in _files(storage, pattern)], _SILENCE)
    files = dict.fromkeys(listed)
    for path in files:
        if ".." in path.split("/"):
            raise UserError(
                f"'{url}': the storage has a file '{path}', whose copy would be in another folder. Rename it."
            )
        _copy(storage, path, home / path.lstrip("/"), copies / _VERSIONS / protocol / path.lstrip("/"))
    _remove_others(storage, patterns, home, {home / path.lstrip("/") for path in files})
    return str(home / str(storage._strip_protocol(url)).lstrip("/"))


def _before_globs(pattern: str) -> str:
    """The folder in which a glob begins; a name without one as it is."""
    start = min((pattern.find(mark) for mark in "*?[" if mark in pattern), default=len(pattern))
    return pattern if start == len(pattern) else pattern[:start].rpartition("/")[0]


def _answered(ask: Callable[[], Found], seconds: float, progress: Callable[[], object] = lambda: None) -> Found:
    """What `ask` returns, unless it takes so long that a storage must be given up, and `progress` stays the same.

    It runs in a thread, because packages of storages wait for minutes or for ever, each in its own way.
    """
    found: list[Found] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(ask())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)  # the program ends without it
    thread.start()
    state, since = progress(), time.monotonic()
    while thread.is_alive():
        thread.join(min(seconds, 1.0))
        if progress() != state:
            state, since = progress(), time.monotonic()
        elif thread.is_alive() and time.monotonic() - since > seconds:
            raise TimeoutError(f"no answer within {seconds:g} seconds")
    if failed:
        raise failed[0]
    return found[0]


def _open_storage(url: str, protocol: str) -> Any:
    try:
        kind = fsspec.get_filesystem_class(get_protocol(url))
        given = [*inspect.signature(kind.__init__).parameters.values()][1:]
        needed = [each.name for each in given if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
        if needed:  # half of an object would be left, which prints a traceback when it is removed
            raise UserError(
                f"'{url}': {protocol} needs {', '.join(needed)}, which a URL of data cannot give. Copy the files."
            )
        return fsspec.filesystem(get_protocol(url))
    except UserError:
        raise
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        install = f"pip install {package}" if package else str(error)
        raise UserError(f"'{url}' needs a package that is not installed: {install}") from error
    except ValueError as error:
        raise UserError(
            f"'{url}': the protocol '{protocol}' is not known; use one such as {', '.join(_PACKAGES)}"
        ) from error


def _files(storage: Any, pattern: str) -> Iterator[str]:
    """The files of a pattern in order: a file, a folder with all that is below it, or the matches of a glob."""
    path = str(storage._strip_protocol(pattern))
    matches = sorted(storage.glob(pattern)) if any(mark in path for mark in "*?[") else [path]
    found = False
    for match in matches:
        for file in sorted(storage.find(match)):  # of a file, the file itself
            found = True
            yield str(file)
    if not found:
        raise UserError(f"nothing matches '{pattern}' in the storage; check the name, and that you may list it")


def _remove_others(storage: Any, patterns: Iterable[str], home: Path, copies: set[Path]) -> None:
    """Remove copies of files that the storage no longer has; other processes' unfinished ones are hidden files."""
    for pattern in patterns:
        local = home / str(storage._strip_protocol(pattern)).lstrip("/")
        for file in map(Path, _files(fsspec.filesystem("file"), str(local.absolute()))):
            if not file.name.startswith(".") and file not in {copy.absolute() for copy in copies}:
                file.unlink(missing_ok=True)


def _copy(storage: Any, path: str, copy: Path, version_file: Path) -> None:
    """Copy one file unless the copy is of this version; several processes may do so at once."""
    # For HTTP, fsspec's own key is the address alone; size and ETag tell more.
    version = str(storage.info(path) if "http" in str(storage.protocol) else storage.ukey(path))
    if copy.is_file() and version_file.is_file() and version_file.read_text() == version:
        return
    sys.stderr.write(f"copying {path} ({storage.size(path) or 0:,} bytes) to {copy}\n")
    for target in (copy, version_file):
        target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=copy.parent, prefix=f".{copy.name}.")
    os.close(handle)
    try:
        _answered(lambda: storage.get_file(path, temporary), _SILENCE, Path(temporary).stat)
        os.replace(temporary, copy)
    finally:
        Path(temporary).unlink(missing_ok=True)
    version_file.write_text(version)
