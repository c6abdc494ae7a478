"""What a run's JSON files must look like to be shown; one that does not is damaged, and its reader is told where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COMMAND", "ENVIRONMENT", "SETTINGS", "fault_in", "has_own_part", "lacking", "misfit"]


@dataclass(frozen=True)
class Kind:
    """What a value may be, and how to say so."""

    told: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    """The fields of an object: those it must have, and those that are looked at only where they are."""

    needed: Mapping[str, Kind]
    optional: Mapping[str, Kind]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _two(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == 2 and all(map(fits, value))


_TEXT = Kind("text", lambda value: isinstance(value, str))
_TEXT_OR_NULL = Kind("text or null", lambda value: value is None or isinstance(value, str))
_TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value))
_COUNT = Kind("a whole number", _is_count)
_NUMBER = Kind("a number", _is_number)
_INTERVAL = Kind("two numbers", _two(_is_number))
_SIZE = Kind("two whole numbers", _two(_is_count))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_OBJECT_OR_NULL = Kind("an object or null", lambda value: value is None or isinstance(value, dict))
_LIST = Kind("a list", lambda value: isinstance(value, list))
_LIST_OR_NULL = Kind("a list", lambda value: value is None or isinstance(value, list))
_ANYTHING = Kind("anything", lambda value: True)

_HELD = {"held": _COUNT, "n": _COUNT, "robust_accuracy": _NUMBER, "ci95": _INTERVAL}
_COSTS = dict.fromkeys(("gradient_calls", "forward_calls", "seconds", "void"), _NUMBER)
_OF_SUITES = ("activations", "ladder", "trade_off", "stability", "corruptions", "perturbations", "study", "training")

COMMAND = Fields({"verb": _TEXT, "settings": _OBJECT}, {"argv": _LIST_OR_NULL})
SETTINGS = Fields({}, {"attacks": _TEXTS})
ENVIRONMENT = Fields({}, {"packages": _OBJECT})
_WHOLE = Fields(
    {},
    {
        **dict.fromkeys(("model", "data", "threat"), _OBJECT),
        **dict.fromkeys(("clean", "worst_case", "protocol", "diagnosis", *_OF_SUITES), _OBJECT_OR_NULL),
        **dict.fromkeys(("attacks", "findings"), _LIST_OR_NULL),
        **dict.fromkeys(("suite", "precision"), _TEXT_OR_NULL),
    },
)
_PARTS: Mapping[str, Fields] = {
    "model": Fields({}, {"spec": _TEXT_OR_NULL, "parameters": _COUNT, "family": _TEXT_OR_NULL}),
    "data": Fields(
        {},
        {
            "spec": _TEXT_OR_NULL,
            "n": _COUNT,
            "class_names": _LIST,
            "left_out": _COUNT,
            "left_out_names": _TEXTS,
            "not_opened": _TEXTS,
            "pixels": _SIZE,
            "preprocessing": _TEXT,
        },
    ),
    "threat": Fields({}, {"norm": _TEXT_OR_NULL, "eps": _NUMBER, "eps_text": _TEXT_OR_NULL}),
    "clean": Fields({"correct": _COUNT, "n": _COUNT, "accuracy": _NUMBER, "ci95": _INTERVAL}, {}),
    "worst_case": Fields(_HELD, {}),
    "protocol": Fields(
        {"name": _TEXT_OR_NULL, "nearest": _TEXT_OR_NULL, "differences": _OBJECT, "remark": _TEXT_OR_NULL},
        {"comparable_with": _TEXT_OR_NULL, "nearest_is": _TEXT_OR_NULL},
    ),
    "diagnosis": Fields(
        {"sentence": _TEXT, "next": _TEXT_OR_NULL}, {"not_examined": _OBJECT, "cost": _OBJECT, "verdict": _TEXT}
    ),
}
_COST = Fields(
    {"images": _COUNT, "gradients": _NUMBER, "forwards": _NUMBER}, {"seconds": _NUMBER, "seconds_at_most": _NUMBER}
)
_FINDING = Fields({"check": _TEXT, "verdict": _TEXT, "evidence": _ANYTHING, "advice": _TEXT_OR_NULL}, {"title": _TEXT})
_ATTACK = Fields(
    {"name": _TEXT, **_HELD, "counts": _TEXT, "attacked": _COUNT, **_COSTS},
    {"settings": _OBJECT, "members": _LIST, "paper_style": _OBJECT_OR_NULL},
)
_ATTACK_OF_A_SUITE = Fields({"name": _TEXT}, {})
_MEMBER = Fields({"name": _TEXT, "attacked": _COUNT, "broken": _COUNT}, {})
_PAPER_STYLE = Fields({"robust_accuracy": _NUMBER, "ci95": _INTERVAL, "remark": _TEXT}, {})


def fault_in(results: Mapping[str, Any]) -> str:
    """The first thing that keeps results from being shown, in words; nothing if all that is there can be."""
    return misfit("", results, _WHOLE) or next(filter(None, _faults_in_parts(results)), "")


def has_own_part(results: Mapping[str, Any]) -> bool:
    """Whether a suite, a study or a training wrote something that is not looked into here."""
    return any(results.get(name) for name in _OF_SUITES)


def _faults_in_parts(results: Mapping[str, Any]) -> Iterator[str]:
    parts = [(name, results.get(name), expected) for name, expected in _PARTS.items()]
    parts.append(("cost", (results.get("diagnosis") or {}).get("cost"), _COST))
    yield from (misfit(name, value, expected) for name, value, expected in parts if value is not None)
    yield _about_protocol(results.get("protocol") or {})
    yield from (misfit("findings", entry, _FINDING) for entry in results.get("findings") or [])
    yield from (_about_attack(entry, results.get("suite")) for entry in results.get("attacks") or [])


def lacking(wanted: Sequence[str], present: Sequence[str]) -> str:
    """'it lacks a, b', or nothing."""
    missing = [name for name in wanted if name not in present]
    return f"it lacks {', '.join(missing)}" if missing else ""


def misfit(name: str, value: Any, expected: Fields) -> str:
    """What is missing from an object called `name`, or of another kind than it should be."""
    fields = value if isinstance(value, Mapping) else {}
    missing = lacking(list(expected.needed), list(fields))
    if missing:
        return f"{missing} in '{name}'" if name else missing
    for key, kind in {**expected.needed, **expected.optional}.items():
        if key in fields and not kind.fits(fields[key]):
            where = f"'{key}' in '{name}'" if name else f"'{key}'"
            given = "null" if fields[key] is None else type(fields[key]).__name__
            return f"{where} should be {kind.told}, got {given}"
    return ""


def _about_protocol(told: Mapping[str, Any]) -> str:
    """Whom a run may be compared with is told only where there is a name for it."""
    wanted = [field for key, field in (("name", "comparable_with"), ("nearest", "nearest_is")) if told.get(key)]
    return lacking(wanted, [key for key in wanted if told.get(key)])


def _about_attack(entry: Any, suite: str | None) -> str:
    """Suites with entries of their own are told in sections of their own, and need only the name here."""
    if suite is not None:
        return misfit("attacks", entry, _ATTACK_OF_A_SUITE)
    fault = misfit("attacks", entry, _ATTACK)
    if fault:
        return fault
    style = entry.get("paper_style")
    inner = [misfit("members", member, _MEMBER) for member in entry.get("members", [])]
    inner += [] if style is None else [misfit("paper_style", style, _PAPER_STYLE)]
    return next(filter(None, inner), "")
