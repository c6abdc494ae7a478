"""Numbers as people write them ('8/255', '0.5', '2e-3'), and budgets that make sense."""

from __future__ import annotations

import math

from vitadel.errors import UserError

__all__ = ["can_diagnose", "quantity_text", "read_quantity", "read_value"]


def read_quantity(text: str | float, what: str = "number") -> float:
    """A finite number; fractions such as 8/255 are read everywhere a number is."""
    if isinstance(text, (int, float)):
        value = float(text)
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
