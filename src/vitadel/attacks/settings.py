"""Every setting of a built attack, flat, as results record it."""

from __future__ import annotations

import dataclasses
from functools import partial

from vitadel.attacks.wrappers import Restarts
from vitadel.quantities import quantity_text
from vitadel.types import Attack

__all__ = ["settings_of"]

_INSIDE = "inner."  # before a setting of the attack inside, where what goes around it has one of the same name


def settings_of(attack: Attack) -> dict[str, object]:
    """Every setting of a built attack, flat, as results record it: nothing about a number stays implicit."""
    settings: dict[str, object] = {} if hasattr(attack, "attack") else {"restarts": 1}
    inside: dict[str, object] = {}
    for part in dataclasses.fields(attack):  # type: ignore[arg-type]
        if not part.repr:
            continue  # what was learned, not set
        value = getattr(attack, part.name)
        if part.name == "attack":
            inside = settings_of(value)
        elif isinstance(attack, Restarts) and part.name == "times":
            settings["restarts"] = value
        elif part.name == "attacks":
            settings["attacks"] = [{"attack": type(member).__name__, **settings_of(member)} for member in value]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            settings[part.name] = type(value).__name__
            inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            settings.update({f"{part.name}.{key}": _told(key, entry) for key, entry in inner.items()})
        else:
            settings[part.name] = _told(part.name, value)
    # Layers may call a setting alike; how often a search is run again is said by the layer that does it.
    alike = settings.keys() - {"restarts"}
    return {f"{_INSIDE}{key}" if key.split(_INSIDE)[-1] in alike else key: inside[key] for key in inside} | settings


def _told(key: str, value: object) -> object:
    """Budgets and lengths as grey levels, everything else as it is."""
    return quantity_text(value) if key in ("eps", "length") and isinstance(value, float) else _plain(value)


def _plain(value: object) -> object:
    if isinstance(value, partial):
        inside = ", ".join(f"{key}={_plain(entry)}" for key, entry in value.keywords.items())
        return f"{value.func.__name__}({inside})"
    return getattr(value, "__name__", value)
