"""Data in object storage, through fsspec: `parquet:s3://bucket/test-*.parquet`, also `gs://`, `hf://` and others.

What a URL names is copied once below the folder of data sets, under the same name, and read from there. A file whose
version in the storage has changed is copied again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec
from braceexpand import braceexpand
from fsspec.utils import get_protocol

from vitadel.errors import UserError

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


def local_copy(url: str, root: Path) -> str:
    """Copy what the URL names, which may have braces and globs, and return the same pattern for the copies."""
    protocol, _, rest = url.partition("://")
    if not rest or ".." in rest.split("/"):
        raise UserError(f"'{url}' is not a URL of files; write e.g. s3://bucket/folder or s3://bucket/test-*.parquet")
    storage = _open_storage(url, protocol)
    home = root / _COPIES / protocol
    try:
        patterns = list(braceexpand(f"{protocol}://{rest}"))
        files = dict.fromkeys(path for pattern in patterns for path in _files(storage, pattern))
        for path in files:
            _copy(storage, path, home / path.lstrip("/"), root / _COPIES / _VERSIONS / protocol / path.lstrip("/"))
        _remove_others(storage, patterns, home, {home / path.lstrip("/") for path in files})
    except UserError:
        raise
    except Exception as error:  # every storage has exceptions of its own
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise UserError(
            f"'{url}' cannot be read ({reason}). Check the name, the network and your credentials for {protocol}."
        ) from error
    return str(home / str(storage._strip_protocol(f"{protocol}://{rest}")).lstrip("/"))


def _open_storage(url: str, protocol: str) -> Any:
    try:
        return fsspec.filesystem(get_protocol(url))
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
        storage.get_file(path, temporary)
        os.replace(temporary, copy)
    finally:
        Path(temporary).unlink(missing_ok=True)
    version_file.write_text(version)
