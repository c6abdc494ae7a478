"""The same attack in another form: with every search going all the way, or with another budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

from vitadel.attacks.apgd import OverTargets
from vitadel.attacks.threats import NORMS
from vitadel.errors import UserError
from vitadel.types import Attack, Threat

__all__ = ["at_eps", "threats_in", "training_form"]


def training_form(attack: Attack) -> Attack:
    """The attack with every search in it going all the way: training wants the worst point, not the first that fools.

    Only a search over several targets keeps stopping at the first that succeeds, as it is meant to.
    """
    return cast(Attack, _rebuilt(attack, _going_all_the_way, lambda part: isinstance(part, OverTargets)))


def _going_all_the_way(part: object) -> object:
    return _with(part, stop_when_fooled=False) if getattr(part, "stop_when_fooled", False) else part


def at_eps(attack: Attack, eps: float) -> Attack:
    """The attack with another eps in every threat inside it.

    Step lengths that it was made with stay what they are (those given in units of eps follow): with a budget that grows
    during training, early steps then reach the ball's surface at once, as in arXiv:2209.07399.
    """
    if eps < 0:
        raise UserError(f"eps must not be negative, got {eps:g}")
    if not threats_in(attack):
        raise UserError(
            f"the eps of {type(attack).__name__} cannot be changed: none of its fields holds a threat "
            f"({', '.join(NORMS)}). Make it a dataclass with a field `threat`."
        )
    return cast(Attack, _rebuilt(attack, lambda part: _with(part, eps=eps) if _is_threat(part) else part))


def _is_threat(part: object) -> bool:
    return type(part) in NORMS.values()


def threats_in(attack: Attack) -> list[Threat]:
    """Every threat that the attack and what it is made of obey."""
    return [cast(Threat, part) for part in _parts(attack) if _is_threat(part)]


def _parts(thing: object) -> Iterator[object]:
    """The thing itself and, through dataclasses and tuples, all that it is made of."""
    yield thing
    for _, child in _children(thing):
        yield from _parts(child)


def _children(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, tuple):
        yield from ((str(place), child) for place, child in enumerate(thing))
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from ((each.name, getattr(thing, each.name)) for each in dataclasses.fields(thing) if each.init)


def _rebuilt(
    thing: object, change: Callable[[object], object], leave: Callable[[object], bool] = lambda part: False
) -> object:
    """The thing with `change` made to each of its parts, the innermost first; what to `leave` is not entered."""
    if leave(thing):
        return thing
    before = dict(_children(thing))
    after = {name: _rebuilt(child, change, leave) for name, child in before.items()}
    new = {name: child for name, child in after.items() if child is not before[name]}
    if new:
        thing = tuple(after.values()) if isinstance(thing, tuple) else _with(thing, **new)
    return change(thing)


def _with(part: object, **new: object) -> object:
    changed: object = dataclasses.replace(cast(Any, part), **new)
    return changed
