"""How numbers and names are written in reports: shares, intervals, durations, lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
