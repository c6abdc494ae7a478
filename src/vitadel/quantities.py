"""Numbers as people write them: read ('8/255', '0.5', '2e-3'), checked against ranges, and shown in reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

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
        if value == 0 and any(digit in above.lower().partition("e")[0] for digit in "123456789"):
            raise UserError(f"{what} {text!r} is too small: it would be rounded to 0. Write 0, or at least 1e-300.")
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


def are_numbers(names: Sequence[str]) -> bool:
    """Whether the names of classes are only the numbers of the labels: nothing is known of such classes."""
    return all(name == str(number) for number, name in enumerate(names))


def can_diagnose(norm: str, eps: float) -> bool:
    """Whether `diagnose` accepts a budget: above 0, in linf too small to make every image gray, and not in l0."""
    return eps > 0 and norm != "l0" and not (norm == "linf" and eps >= 0.5)


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
WORKERS = Range("from 0 to 256", lambda value: 0 <= value <= 256)  # processes: each takes memory


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


def percent(value: float) -> str:
    """'97.8 %'; a share that is neither none nor all is never rounded to 0.0 or 100.0."""
    return f"{round_percent(100 * value)} %"


def round_percent(value: float, digits: int = 1) -> str:
    while 0 < value < 100 and digits < 6 and round(value, digits) in (0, 100):
        digits += 1
    return f"{value:.{digits}f}"


def interval_text(interval: Sequence[float]) -> str:
    low, high = (percent(end).removesuffix(" %") for end in interval)
    return f"{low} to {high} %"


def share_text(entry: Mapping[str, Any], name: str) -> str:
    """'97.8 % (95.1 to 99.0 %)'."""
    return f"{percent(entry[name])} ({interval_text(entry['ci95'])})"


def p_text(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def plain(value: object) -> str:
    """Evidence and settings as a person would write them."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(entry)}" for key, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def listed(names: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def printable(text: str) -> str:
    """Replace characters that break lines or files."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def shorten(text: str, most: int) -> str:
    """One printable line of at most so many characters; what is too long loses its middle."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"
