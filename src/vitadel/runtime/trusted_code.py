"""Python code that a file names, such as a recipe or a run folder, runs only if the user trusts the file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from vitadel.errors import UserError

VARIABLE = "VITADEL_TRUST_CODE"
"""Set to 1 by --trust-code, or by scripts."""


def check_code_trusted(code: str | None, where: str) -> None:
    """Refuse code that `where`, which may come from somebody else, names; what the user typed needs no check."""
    if code is not None and os.environ.get(VARIABLE) != "1":
        raise UserError(
            f"{where} names Python code, {code!r}, which would be imported and run. If you trust its author, add "
            f"--trust-code (in scripts: {VARIABLE}=1); nothing was run."
        )


def names_code(text: str) -> bool:
    """Whether the name of an attack, in any spelling, makes the user's code run."""
    return "python:" in text.lower()


def _texts(value: object) -> Iterator[str]:
    """All texts in nested mappings and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def code_in_recipe(document: Mapping[str, Any]) -> list[str]:
    """The code that a recipe names: `python:` models and attacks, and objectives, plug-ins and adapters by their
    dotted path."""
    named = []
    for section, content in document.items():
        if not isinstance(content, Mapping):
            continue
        named += [text for text in _texts(content) if names_code(text)]
        if section == "plugins":
            named += [str(name) for name in content if "." in str(name)]
        elif "." in str(content.get("use", "")):
            named.append(str(content["use"]))
    return named
