"""Allowed ranges of the numbers in a recipe, and one message for all that lie outside."""

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


# All are false for NaN.
POSITIVE = Range("a finite number above 0", lambda value: 0 < value < inf)
NOT_NEGATIVE = Range("a finite number of at least 0", lambda value: 0 <= value < inf)
AT_LEAST_ONE = Range("at least 1", lambda value: 1 <= value < inf)
SHARE = Range("in [0, 1]", lambda value: 0 <= value <= 1)
BELOW_ONE = Range("at least 0 and below 1", lambda value: 0 <= value < 1)
BETWEEN = Range("between 0 and 1, without either", lambda value: 0 < value < 1)
SEED = Range("a whole number from 0 to 2**62", lambda value: 0 <= value <= 2**62)


def check_ranges(section: object, **ranges: Range) -> None:
    """Raise one `UserError` for all fields of `section` that lie outside their range; None is not checked."""
    wrong = []
    for name, allowed in ranges.items():
        value = getattr(section, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if not all(map(allowed.holds, numbers)):
            wrong.append(f"{name} must be {allowed.words}, got {list(value) if isinstance(value, tuple) else value}")
    if wrong:
        raise UserError("; ".join(wrong))
