"""Which split: the one asked for, else the one to test on, under any of its usual names."""

from __future__ import annotations

from collections.abc import Iterable

from vitadel.errors import UserError

__all__ = ["SPLIT_NAMES", "pick_split"]

_VALIDATION = ("val", "validation", "valid", "dev")
SPLIT_NAMES = ("test", *_VALIDATION, "train", "trainval")
"""Names by which folders and files are recognised as splits."""


def pick_split(available: Iterable[str], wanted: str | None, where: str) -> str:
    """One of `available`. Without a wish: test, else validation; never train, as auditing on it would mislead."""
    names = list(available)
    if wanted is None:
        choices: tuple[str, ...] = ("test", *_VALIDATION)
    else:
        choices = (wanted, *_VALIDATION) if wanted in _VALIDATION else (wanted,)
    for choice in choices:
        if choice in names:
            return choice
    there = ", ".join(names)
    if wanted is None:
        raise UserError(f"{where} has no split to test on; it has: {there}. Pick one, e.g. with the suffix @{names[0]}")
    raise UserError(f"{where} has no split '{wanted}'; it has: {there}")
