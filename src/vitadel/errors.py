"""Errors that the user can correct. A message says what is wrong, what was given, what is allowed and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path

__all__ = ["Interrupted", "Mistake", "UserError", "check_known", "nearest_names", "unknown_name"]


class UserError(ValueError):
    """An error that the user can correct. The command line prints it without a traceback and exits with code 2."""


Mistake = UserError
"""The name before version 0.2; scripts of users may catch it."""


class Interrupted(BaseException):
    """Ctrl-C during a run whose finished batches are saved in `folder`; like KeyboardInterrupt, no ordinary error."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def nearest_names(given: str, known: Iterable[str], most: int = 3) -> str:
    """'; did you mean a, b?' or an empty text, to append to a message about an unknown name."""
    close = difflib.get_close_matches(given, list(known), n=most, cutoff=0.5)
    return f"; did you mean {', '.join(close)}?" if close else ""


def unknown_name(what: str, given: object, known: Collection[str], of: str = "") -> UserError:
    """The error about a name that is not among the known ones: it names those that are near, and all of them."""
    near = nearest_names(str(given), known) or "."
    return UserError(f"unknown {what} {given!r}{of}{near} Known: {', '.join(known)}.")


def check_known(what: str, given: object, known: Collection[str], of: str = "") -> None:
    """Refuse a name that is not among the known ones; `of` follows the name in the message."""
    if given not in known:
        raise unknown_name(what, given, known, of)
