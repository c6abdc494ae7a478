"""The settings of a built attack: list them for results, or rebuild the attack with other ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

from vitadel.attacks.apgd import OverTargets
from vitadel.attacks.threats import ALL_NORMS
from vitadel.attacks.wrappers import Restarts
from vitadel.errors import UserError
from vitadel.quantities import quantity_text
from vitadel.types import Attack, Threat

Part = TypeVar("Part")
_INNER = "inner."  # before a setting of the inner attack, where its wrapper has one of the same name


def settings_of(attack: Attack) -> dict[str, object]:
    """Every setting of a built attack in one flat mapping, defaults included, as results record it."""
    settings: dict[str, object] = {} if hasattr(attack, "attack") else {"restarts": 1}
    inner: dict[str, object] = {}
    for part in dataclasses.fields(attack):  # type: ignore[arg-type]
        if not part.repr:
            continue  # learned, not set
        value = getattr(attack, part.name)
        if part.name == "attack":
            inner = settings_of(value)
        elif isinstance(attack, Restarts) and part.name == "times":
            settings["restarts"] = value
        elif part.name == "attacks":
            settings["attacks"] = [{"attack": type(member).__name__, **settings_of(member)} for member in value]
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            settings[part.name] = type(value).__name__
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            settings.update({f"{part.name}.{key}": _recorded(key, entry) for key, entry in fields.items()})
        else:
            settings[part.name] = _recorded(part.name, value)
    # Only the layer that restarts a search records `restarts`; other names shared by two layers are kept apart.
    shared = settings.keys() - {"restarts"}
    return {f"{_INNER}{key}" if key.split(_INNER)[-1] in shared else key: inner[key] for key in inner} | settings


def _recorded(key: str, value: object) -> object:
    """Budgets and step lengths as fractions of 255, functions and parts by their name, everything else as it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__
    if key in ("eps", "length") and isinstance(value, float):
        return quantity_text(value)
    if isinstance(value, partial):
        arguments = ", ".join(f"{name}={_recorded('', entry)}" for name, entry in value.keywords.items())
        return f"{value.func.__name__}({arguments})"
    return getattr(value, "__name__", value)


def part_inside(attack: Attack, kind: type[Part]) -> tuple[Part, Callable[[Attack], Attack]] | None:
    """The part of this kind that an attack is or wraps, and what puts the same around another attack; else None."""
    if isinstance(attack, kind):
        return attack, lambda other: other
    found = part_inside(attack.attack, kind) if hasattr(attack, "attack") else None
    if found is None:
        return None
    part, around = found
    return part, lambda other: cast(Attack, dataclasses.replace(cast(Any, attack), attack=around(other)))


def training_form(attack: Attack) -> Attack:
    """The attack with `stop_when_fooled` off in every search: training wants the worst point, not the first that fools.

    Searches over several targets keep stopping at the first target that succeeds, as they are meant to.
    """
    return cast(Attack, _rebuild(attack, _search_to_the_end, lambda part: isinstance(part, OverTargets)))


def _search_to_the_end(part: object) -> object:
    return _replace(part, stop_when_fooled=False) if getattr(part, "stop_when_fooled", False) else part


def at_eps(attack: Attack, eps: float) -> Attack:
    """The attack with another eps in every threat inside it.

    Step lengths stay as they were given, unless they are in units of eps. With a budget that grows during training,
    early steps then reach the surface of the ball at once, as in arXiv:2209.07399.
    """
    if eps < 0:
        raise UserError(f"eps must not be negative, got {eps:g}")
    if not threats_in(attack):
        raise UserError(
            f"the eps of {type(attack).__name__} cannot be changed: none of its fields holds a threat "
            f"({', '.join(ALL_NORMS)}). Make it a dataclass with a field `threat`."
        )
    return cast(Attack, _rebuild(attack, lambda part: _replace(part, eps=eps) if _is_threat(part) else part))


def _is_threat(part: object) -> bool:
    return type(part) in ALL_NORMS.values()


def threats_in(attack: Attack) -> list[Threat]:
    """Every threat inside an attack and its parts."""
    return [cast(Threat, part) for part in _parts(attack) if _is_threat(part)]


def _parts(thing: object) -> Iterator[object]:
    """The thing and, through dataclasses and tuples, everything inside it."""
    yield thing
    for _, child in _children(thing):
        yield from _parts(child)


def _children(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, tuple):
        yield from ((str(place), child) for place, child in enumerate(thing))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from ((each.name, getattr(thing, each.name)) for each in dataclasses.fields(thing) if each.init)


def _rebuild(
    thing: object, change: Callable[[object], object], skip: Callable[[object], bool] = lambda part: False
) -> object:
    """The thing with `change` applied to each of its parts, innermost first; parts to `skip` stay as they are."""
    if skip(thing):
        return thing
    before = dict(_children(thing))
    after = {name: _rebuild(child, change, skip) for name, child in before.items()}
    new = {name: child for name, child in after.items() if child is not before[name]}
    if new:
        thing = tuple(after.values()) if isinstance(thing, tuple) else _replace(thing, **new)
    return change(thing)


def _replace(part: object, **new: object) -> object:
    changed: object = dataclasses.replace(cast(Any, part), **new)
    return changed


def pixels_per_unit(attack: object) -> float:
    """The largest unit of an attack's budget in pixels: 1, unless the attack has units of its own."""
    inner = getattr(attack, "attack", attack)  # inside restarts
    return float(getattr(inner, "pixels_per_unit", 1.0))
