"""The fields that reports read from a run's JSON files, and a check that names the first one that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "COMMAND",
    "ENVIRONMENT",
    "OBJECT",
    "SETTINGS",
    "TEXT",
    "TEXT_OR_NULL",
    "Fields",
    "fault_in",
    "lacking",
    "misfit",
]


@dataclass(frozen=True)
class FieldType:
    """A test of values, and what to call those that pass it."""

    name: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Fields:
    """The fields of an object: those it must have, and those that are checked where they are present."""

    needed: Mapping[str, FieldType]
    optional: Mapping[str, FieldType] = field(default_factory=dict)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _two(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and len(value) == 2 and all(map(fits, value))


def _or_null(kind: FieldType) -> FieldType:
    return FieldType(f"{kind.name} or null", lambda value: value is None or kind.fits(value))


TEXT = FieldType("text", lambda value: isinstance(value, str))
TEXT_OR_NULL = _or_null(TEXT)
_NUMBER = FieldType("a number", _is_number)
OBJECT = FieldType("an object", lambda value: isinstance(value, dict))
_TEXTS = FieldType("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.fits, value)))
_COUNT = FieldType("a whole number", _is_count)
_INTERVAL = FieldType("two numbers", _two(_is_number))
_SIZE = FieldType("two whole numbers", _two(_is_count))
_LIST = FieldType("a list", lambda value: isinstance(value, list))
_ANYTHING = FieldType("anything", lambda value: True)

COMMAND = Fields({"verb": TEXT, "settings": OBJECT}, {"argv": _or_null(_LIST)})
SETTINGS = Fields({}, {"attacks": _TEXTS})
ENVIRONMENT = Fields({}, {"packages": OBJECT})
_WHOLE = Fields(
    {},
    {
        **dict.fromkeys(("model", "data", "threat"), OBJECT),
        **dict.fromkeys(("clean", "worst_case", "protocol", "study"), _or_null(OBJECT)),
        **dict.fromkeys(("attacks", "findings"), _or_null(_LIST)),
        **dict.fromkeys(("suite", "precision"), TEXT_OR_NULL),
    },
)
_ROBUST = {"held": _COUNT, "n": _COUNT, "robust_accuracy": _NUMBER, "ci95": _INTERVAL}
_PARTS: Mapping[str, Fields] = {
    "model": Fields({}, {"spec": TEXT_OR_NULL, "parameters": _COUNT, "family": TEXT_OR_NULL}),
    "data": Fields(
        {},
        {
            "spec": TEXT_OR_NULL,
            "n": _COUNT,
            "class_names": _LIST,
            "left_out": _COUNT,
            "left_out_names": _TEXTS,
            "not_opened": _TEXTS,
            "pixels": _SIZE,
            "preprocessing": TEXT,
        },
    ),
    "threat": Fields({}, {"norm": TEXT_OR_NULL, "eps": _NUMBER, "eps_text": TEXT_OR_NULL}),
    "clean": Fields({"correct": _COUNT, "n": _COUNT, "accuracy": _NUMBER, "ci95": _INTERVAL}),
    "worst_case": Fields(_ROBUST),
    "protocol": Fields(
        {"name": TEXT_OR_NULL, "nearest": TEXT_OR_NULL, "differences": OBJECT, "remark": TEXT_OR_NULL},
        {"comparable_with": TEXT_OR_NULL, "nearest_is": TEXT_OR_NULL},
    ),
}
_FINDING = Fields({"check": TEXT, "verdict": TEXT, "evidence": _ANYTHING, "advice": TEXT_OR_NULL}, {"title": TEXT})
_ATTACK = Fields(
    {
        "name": TEXT,
        **_ROBUST,
        "counts": TEXT,
        "attacked": _COUNT,
        **dict.fromkeys(("gradient_calls", "forward_calls", "seconds", "void"), _NUMBER),
    },
    {"settings": OBJECT, "members": _LIST, "paper_style": _or_null(OBJECT)},
)
_MEMBER = Fields({"name": TEXT, "attacked": _COUNT, "broken": _COUNT})
_PAPER_STYLE = Fields({"robust_accuracy": _NUMBER, "ci95": _INTERVAL, "remark": TEXT})


def fault_in(results: Mapping[str, Any]) -> str:
    """The first field, of those that every kind of run may have, that cannot be shown; '' if all can."""
    return misfit("", results, _WHOLE) or next(filter(None, _faults_in_parts(results)), "")


def _faults_in_parts(results: Mapping[str, Any]) -> Iterator[str]:
    present = {name: results[name] for name in _PARTS if results.get(name) is not None}
    yield from (misfit(name, value, _PARTS[name]) for name, value in present.items())
    protocol = results.get("protocol") or {}
    # A protocol that is named also says what the run may be compared with.
    wanted = [name for key, name in (("name", "comparable_with"), ("nearest", "nearest_is")) if protocol.get(key)]
    yield lacking(wanted, [name for name in wanted if protocol.get(name)])
    yield from (misfit("findings", entry, _FINDING) for entry in results.get("findings") or [])
    for entry in results.get("attacks") or []:
        if results.get("suite") is not None:  # suites have sections of their own for their attacks
            yield misfit("attacks", entry, Fields({"name": TEXT}))
            continue
        yield misfit("attacks", entry, _ATTACK)
        yield from (misfit("members", member, _MEMBER) for member in entry.get("members", []))
        if entry.get("paper_style") is not None:
            yield misfit("paper_style", entry["paper_style"], _PAPER_STYLE)


def lacking(wanted: Sequence[str], present: Sequence[str]) -> str:
    """'it lacks a, b', or nothing."""
    missing = [name for name in wanted if name not in present]
    return f"it lacks {', '.join(missing)}" if missing else ""


def misfit(name: str, value: Any, expected: Fields) -> str:
    """What is missing from the object called `name`, or has the wrong type; '' if nothing."""
    fields = value if isinstance(value, Mapping) else {}
    missing = lacking(list(expected.needed), list(fields))
    if missing:
        return f"{missing} in '{name}'" if name else missing
    for key, kind in {**expected.needed, **expected.optional}.items():
        if key in fields and not kind.fits(fields[key]):
            where = f"'{key}' in '{name}'" if name else f"'{key}'"
            given = "null" if fields[key] is None else type(fields[key]).__name__
            return f"{where} should be {kind.name}, got {given}"
    return ""
