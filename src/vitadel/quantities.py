"""Numbers as people write them ('8/255', '0.5', '2e-3'), their allowed ranges, and the budgets of a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from vitadel.errors import UserError


def read_quantity(text: str | float, what: str = "number") -> float:
    """A finite number; fractions such as 8/255 are read everywhere a number is."""
    if not isinstance(text, str):
        value = float(text)  # also of NumPy and torch
    else:
        above, slash, below = text.partition("/")
        try:
            value = float(above) / float(below) if slash else float(above)
        except (ValueError, ZeroDivisionError):
            raise UserError(f"{what} {text!r} is not a number; write it like 8/255, 0.03 or 1e-3") from None
    if not math.isfinite(value):
        raise UserError(f"{what} must be finite, got {text!r}")
    return value


def quantity_text(value: float) -> str:
    """'8/255' for a multiple of a quarter gray level up to 64, else a plain decimal."""
    quarters = value * 255 * 4
    if 0 < quarters <= 64 * 4 and abs(quarters - round(quarters)) < 1e-6:
        return f"{round(quarters) / 4:g}/255"
    return f"{value:.12g}"


def duration(seconds: float) -> str:
    """'12.3 s', '4.5 min' or '6.7 h'."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def read_value(text: str) -> float | int | bool | str:
    """A setting's value: true/false, an integer, a number or fraction, else the text itself."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    try:
        return int(lowered)
    except ValueError:
        pass
    try:
        return read_quantity(lowered)
    except UserError:
        return text.strip()


def can_diagnose(norm: str, eps: float) -> bool:
    """Whether `diagnose` accepts a budget: above 0, and in linf too small to make every image gray."""
    return eps > 0 and not (norm == "linf" and eps >= 0.5)


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
