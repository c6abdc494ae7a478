"""Secret files, which only their owner may read, and fingerprints that identify a secret without revealing it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from vitadel.errors import UserError
from vitadel.runtime.run_folder import write_atomically
from vitadel.runtime.safe_reading import check_regular_file

_OWNER_ONLY = 0o600
_BY_OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
_SHORT = 16  # hexadecimal digits


def write_secret(path: str | Path, content: bytes) -> None:
    """Write a file of mode 0600, whatever the umask, atomically; others cannot read it even while it is written."""
    write_atomically(Path(path), content, mode=_OWNER_ONLY)


def read_secret(path: str | Path, allow_readable: bool | None = False) -> bytes:
    """The content of a file that only its owner can read or change; with `allow_readable`, of any file.

    With None the error message does not mention `allow_readable`: the caller does not offer it.
    """
    try:
        check_regular_file(Path(path), "secret file")
        with open(path, "rb") as file:
            # Of the open file, not of its name, which may be a different file a moment later.
            status = os.fstat(file.fileno())
            if not allow_readable:
                _refuse_readable(path, status.st_mode, offer_flag=allow_readable is not None)
            return file.read()
    except OSError as error:
        raise UserError(
            f"secret file '{path}' cannot be read: {error.strerror or error}. "
            "Give a file that you own, and check its permissions."
        ) from error


def _refuse_readable(path: str | Path, mode: int, offer_flag: bool) -> None:
    if os.name == "posix" and mode & _BY_OTHERS:
        around = "; to use it as it is, pass --allow-readable (in Python: allow_readable=True)" if offer_flag else ""
        raise UserError(
            f"secret file '{path}' has mode {stat.S_IMODE(mode):04o}: users other than its owner can read or change "
            f"it, and may have done so. Run `chmod 600 {path}`{around}."
        )


def fingerprint(content: bytes, salt: bytes) -> str:
    """A short salted SHA-256 of `content`, which reveals neither content nor salt.

    The salt belongs to the secret: without it no one can test a guess, or see that two runs used the same secret.
    """
    assert salt, "without a salt, equal secrets have equal fingerprints everywhere"
    return hashlib.sha256(len(salt).to_bytes(8, "little") + salt + content).hexdigest()[:_SHORT]
