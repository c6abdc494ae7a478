"""From mappings to dataclasses and attacks, with everything that is wrong gathered instead of raised one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, SimpleNamespace
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from vitadel.attacks.parse import make, split_attack_list
from vitadel.errors import UserError, nearest_names
from vitadel.training.recipes.documents import OTHER_WORDS
from vitadel.training.recipes.sections import ThreatSection
from vitadel.types import Attack, Calibrated

__all__ = ["Faults", "Faulty", "as_given", "as_mapping", "guarded", "named_attack", "settled"]

Made = TypeVar("Made")


class Faulty(UserError):
    """All that is wrong with one recipe, or one row of it."""

    def __init__(self, where: str, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        problems = "1 problem" if len(self.faults) == 1 else f"{len(self.faults)} problems"
        super().__init__("\n  - ".join([f"recipe {where} has {problems}:", *self.faults]))


@dataclass
class Faults:
    """Found so far, in the order in which they are told."""

    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        return [*self.unknown, *self.missing, *self.wrong]

    def attempt(self, path: str, function: Callable[..., Made], /, *arguments: object, **named: object) -> Made | None:
        """What the call gives, or its mistake noted under `path`."""
        try:
            return function(*arguments, **named)
        except UserError as mistake:
            self.wrong.append(f"{path}: {mistake}")
            return None


def guarded(function: Callable[..., Made]) -> Callable[..., Made]:
    """For classes that may be the user's: whatever they raise is a mistake to be told with the others."""

    def guarded(*arguments: object, **named: object) -> Made:
        try:
            return function(*arguments, **named)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"it failed with {type(error).__name__}: {error}") from error

    return guarded


def as_mapping(path: str, value: object, faults: Faults) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    faults.wrong.append(f"{path}: should be keys with values, got {value!r}")
    return {}


def settled(
    path: str, cls: Callable[..., Made], given: Mapping[str, Any], faults: Faults, threat: ThreatSection | None = None
) -> Made | None:
    """`cls` called with the settings; None if any of them is a fault."""
    before = len(faults.all())
    parameters = inspect.signature(cls).parameters
    hints = _hints(cls)
    given = {key: value for key, value in given.items() if value is not None or _may_be_nothing(key, hints)}
    for key in given:
        if key not in parameters:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes nothing"
            faults.unknown.append(f"{path}: has no '{key}'; {takes}{_meant(key, parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in given:
            faults.missing.append(f"{path}: needs '{key}'")
    values = {}
    for key, value in given.items():
        if key in parameters:
            values[key] = _value(f"{path}.{key}", key, hints.get(key), value, faults, threat)
    return faults.attempt(path, guarded(cls), **values) if len(faults.all()) == before else None


def as_given(path: str, cls: Any, given: Mapping[str, Any]) -> Any:
    """The settings of a section that cannot be built: those that are given and make sense, and defaults.

    So that what they name is looked up all the same, and one fault does not hide another.
    """
    hints = get_type_hints(cls)
    known = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
    for key, value in given.items():
        faults = Faults()
        made = _value(f"{path}.{key}", key, hints.get(key), value, faults, None) if key in hints else None
        if key in hints and not faults.all():
            known[key] = made
    return SimpleNamespace(**known)


def _meant(key: str, known: Mapping[str, object]) -> str:
    other = OTHER_WORDS.get(key)
    return f"; did you mean {other}?" if other in known else nearest_names(key, known)


def _may_be_nothing(key: str, hints: Mapping[str, Any]) -> bool:
    """A null takes a setting away, so that its default holds; unless it is a value of it, or there is none such."""
    return key not in hints or NoneType in get_args(hints[key])


def _hints(cls: Any) -> dict[str, Any]:
    """Types of the settings; a class of the user's may have some that only exist for type checkers."""
    try:
        return get_type_hints(cls)
    except Exception:  # they are code, evaluated here
        return {}


def _value(path: str, key: str, hint: Any, value: Any, faults: Faults, threat: ThreatSection | None) -> Any:
    if threat is not None and (Attack in (hint, *get_args(hint)) or (hint is None and key == "attack")):
        return _training_attack(path, value, threat, faults)
    if path == "audit.attacks" and isinstance(value, str):
        return tuple(faults.attempt(path, split_attack_list, value) or ())
    if hint is None:
        return value
    try:
        # Pydantic turns texts into numbers, which is welcome, and true into 1, which is not.
        return TypeAdapter(hint).validate_python(value, strict=isinstance(value, bool))
    except PydanticUserError:  # a type that it knows nothing about, such as a class of the user's
        return value
    except ValidationError as error:
        for fault in error.errors():
            place = "".join(f"[{part}]" for part in fault["loc"] if isinstance(part, int))
            faults.wrong.append(f"{path}{place}: {fault['msg'].removeprefix('Input ')}, got {fault['input']!r}")
        return None


def _training_attack(path: str, name: object, threat: ThreatSection, faults: Faults) -> Attack | None:
    if name is None:
        return None
    attack = named_attack(path, name, threat, faults)
    made: object = attack
    if isinstance(made, Calibrated):
        faults.wrong.append(
            f"{path}: '{name}' first studies the model on other images, which an attack inside training cannot; "
            "training against scaled attention is the plug-in attention_scaling"
        )
        return None
    return attack


def named_attack(path: str, name: object, threat: ThreatSection, faults: Faults) -> Attack | None:
    if not isinstance(name, str):
        faults.wrong.append(f"{path}: should be the name of an attack, e.g. pgd-10(step=2/255), got {name!r}")
        return None
    return faults.attempt(path, make, name, eps=threat.eps, norm=threat.norm)
