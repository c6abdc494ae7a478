"""A composed recipe as YAML again: texts first, fractions as fractions."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import yaml

from vitadel.training.recipes.documents import TEXTS

__all__ = ["recipe_text"]


def recipe_text(document: Mapping[str, Any]) -> str:
    """A document as YAML: texts first, fractions as fractions; reads back as the same document."""
    said = "".join(_text_entry(key, document[key]) for key in TEXTS if key in document)
    rest = {key: _written(value) for key, value in document.items() if key not in TEXTS}
    return said + yaml.safe_dump(rest, sort_keys=False, allow_unicode=True, width=118)


def _text_entry(key: str, text: object) -> str:
    lines = str(text).strip().splitlines()
    if len(lines) < 2:
        return yaml.safe_dump({key: str(text).strip()}, allow_unicode=True, width=118)
    return f"{key}: |-\n" + "".join(f"  {line}\n" for line in lines)


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _written(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_written(entry) for entry in value]
    if isinstance(value, float) and len(repr(value)) > 12:  # not 0.2, which is 51/255 as well
        near, levels = Fraction(value).limit_denominator(12), round(value * 255, 6)
        if float(near) == value:
            return str(near)
        return f"{levels:g}/255" if levels / 255 == value else value
    return value
