"""Files that only their owner may read, and how to name a secret in public without telling it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically

__all__ = ["fingerprint", "read_secret", "write_secret"]

_OWNER_ONLY = 0o600
_BY_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_SHORT = 16  # hexadecimal digits


def write_secret(path: str | Path, content: bytes) -> None:
    """Write a file of mode 0600, whatever the umask: the old file or the whole new one is there, never a part.

    At no moment can anybody else read it, not even while it is being written.
    """
    write_atomically(Path(path), content, mode=_OWNER_ONLY)


def read_secret(path: str | Path, allow_readable: bool | None = False) -> bytes:
    """The content of a file that nobody but its owner can read or change; with `allow_readable`, of any file.

    None is for callers that leave no choice: no way around is told.
    """
    try:
        with open(path, "rb") as file:
            # Of the open file, not of its name: that may mean another file a moment later.
            status = os.fstat(file.fileno())
            if not allow_readable:
                _refuse_open_doors(path, status.st_mode, way_around=allow_readable is not None)
            return file.read()
    except FileNotFoundError:
        raise UserError(
            f"secret file '{path}' does not exist. Check the path (it is relative to {Path.cwd()})."
        ) from None
    except OSError as error:
        raise UserError(
            f"secret file '{path}' cannot be read: {error.strerror or error}. "
            "Give a file that you own, and check its permissions."
        ) from error


def _refuse_open_doors(path: str | Path, mode: int, way_around: bool) -> None:
    if os.name == "posix" and mode & _BY_OTHERS:
        around = "; to use it as it is, pass --allow-readable (in Python: allow_readable=True)" if way_around else ""
        raise UserError(
            f"secret file '{path}' has mode {stat.S_IMODE(mode):04o}: others than its owner can read or change it, and "
            f"may have done so. Close it with `chmod 600 {path}`{around}."
        )


def fingerprint(content: bytes, salt: bytes) -> str:
    """A short name of `content`, a salted SHA-256: the same for the same content and salt, and it tells of neither.

    The salt belongs to the secret: without it nobody can test a guess, or see that two runs used the same secret.
    """
    assert salt, "without a salt, equal secrets have equal fingerprints everywhere"
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + content).hexdigest()[:_SHORT]
