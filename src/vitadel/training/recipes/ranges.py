"""Ranges that the numbers of a recipe must lie in, with the words for a person who left one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from vitadel.errors import UserError

__all__ = ["AT_LEAST_ONE", "BELOW_ONE", "BETWEEN", "NOT_NEGATIVE", "POSITIVE", "SEED", "SHARE", "Range", "check_ranges"]


@dataclass(frozen=True)
class Range:
    words: str
    holds: Callable[[float], bool]


# Written so that they are false for NaN, which every comparison is.
POSITIVE = Range("a finite number above 0", lambda value: 0 < value < inf)
NOT_NEGATIVE = Range("a finite number of at least 0", lambda value: 0 <= value < inf)
AT_LEAST_ONE = Range("at least 1", lambda value: 1 <= value < inf)
SHARE = Range("in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
BETWEEN = Range("between 0 and 1, without either", lambda value: 0 < value < 1)
SEED = Range("a whole number from 0 to 2**62", lambda value: 0 <= value <= 2**62)


def check_ranges(section: object, **ranges: Range) -> None:
    """One `UserError` about all fields of `section` that lie outside; None, where a field may be that, is no number."""
    wrong = []
    for name, allowed in ranges.items():
        value = getattr(section, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(map(allowed.holds, numbers)):
            wrong.append(f"{name} must be {allowed.words}, got {list(value) if isinstance(value, tuple) else value}")
    if wrong:
        raise UserError("; ".join(wrong))
