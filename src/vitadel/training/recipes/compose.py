"""Compose a recipe: merge what it extends, pick a row of its sweep, apply key=value overrides."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from vitadel.errors import UserError, nearest_names
from vitadel.runtime.trusted_code import check_code_trusted, code_in_recipe
from vitadel.training.recipes.yaml_files import (
    FILE_ENDINGS,
    OTHER_WORDS,
    TEXTS,
    convert_numbers,
    find_recipe,
    parse_recipe,
    read_text,
    read_yaml,
    translate,
    without_full_precision,
)

__all__ = [
    "IDLE",
    "PROBE_SECTIONS",
    "SECTIONS",
    "compose",
    "deciding",
    "dotted",
    "is_probe",
    "merge",
    "rows",
    "section_types",
    "source",
    "texts",
    "unknown_section",
]

Document = dict[str, Any]

IDLE = (*TEXTS, "data.workers", "data.skip_bad", "train.tracker", "train.checkpoint_every")
"""Keys that do not change the result: a run may resume with other values of them."""

SECTIONS = (
    "model",
    "data",
    "augmentation",
    "threat",
    "objective",
    "plugins",
    "adapter",
    "optimizer",
    "schedule",
    "train",
    "validation",
    "audit",
)
"""The sections of a recipe for `vitadel harden`."""

_MOST_LEVELS = 20
_COMPONENTS = ("objective", "plugins", "adapter")  # their keys depend on what they name

PROBE_SECTIONS = ("model", "tokens", "data", "head", "train", "audit")
"""The sections of a recipe for `vitadel probe`; `tokens` is the path of a file."""

_ORDER = TEXTS + PROBE_SECTIONS[:-2] + tuple(name for name in SECTIONS if name not in PROBE_SECTIONS[:-2])


def is_probe(document: Mapping[str, Any]) -> bool:
    """Whether a recipe trains a head on frozen features (`vitadel probe`) or a model (`vitadel harden`)."""
    return "head" in document


def section_types(document: Mapping[str, Any] | None = None) -> dict[str, type]:
    """Dataclasses of the sections, without objective, plug-ins and adapter; of a probe those of its kind of head."""
    # Lists and help also compose recipes and should not wait for torch.
    from vitadel.training.recipes import training_sections as sections

    if document is not None and is_probe(document):
        from vitadel.training.recipes.probe_sections import probe_types

        return probe_types(document["head"])
    return {
        "model": sections.ModelSection,
        "data": sections.DataSection,
        "augmentation": sections.Augmentation,
        "threat": sections.ThreatSection,
        "optimizer": sections.OptimizerSection,
        "schedule": sections.Schedule,
        "train": sections.TrainSection,
        "validation": sections.Validation,
        "audit": sections.AuditSection,
    }


def source(name: str) -> str:
    """The text of a recipe's file, with its comments."""
    return read_text(find_recipe(name), name)


def texts(name: str) -> dict[str, str]:
    """The texts for human readers, the same for all rows."""
    document = _extended(name)
    return {key: str(document[key]).strip() for key in TEXTS if document.get(key)}


def rows(name: str) -> list[str]:
    """The rows of its sweep, in order; empty for a recipe of a single training."""
    return list(_sweep(_extended(name), name))


def compose(name: str | Path, row: str | None = None, overrides: Sequence[str] | Mapping[str, object] = ()) -> Document:
    """The whole recipe as one plain document, without `extends` and `sweep`.

    `name` is that of a shipped recipe or a path to a .yaml file. `overrides` are texts 'train.epochs=3' or a mapping
    {'train.epochs': 3}; values are read as YAML, fractions as numbers. A null removes a key. Unknown keys are reported
    when the document is built, with everything else that is wrong.
    """
    if not isinstance(name, str | Path):
        raise UserError(
            f"a recipe must be a name or the path of a file, got a {type(name).__name__}; to train your own model, "
            "name it in the recipe, as model.name: python:module:function"
        )
    document = _with_row(_extended(str(name)), str(name), row)
    asked = translate(dict(_pairs(overrides)), document, "overrides")
    removed = [_path(key, document) for key, value in asked.items() if value is None]
    unknown = (_nested(path, None) for path in removed if _removes_unknown(path, document))
    composed = reduce(merge, unknown, _without_nulls(_with_dotted(document, asked)))
    if str(name).endswith(FILE_ENDINGS):  # shipped recipes name no code, and overrides are typed by the user
        from_file = code_in_recipe(document)
        code = next((each for each in code_in_recipe(composed) if each in from_file), None)
        check_code_trusted(code, f"recipe '{name}'")
    return composed


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Document:
    """`over` wins, key by key and mapping by mapping; lists are replaced.

    A mapping with another `use` replaces the old one: settings of one objective mean nothing for another.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        deep = (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("use", old.get("use")) == old.get("use")
        )
        merged[key] = merge(old, value) if deep and isinstance(old, Mapping) else value
    return merged


def deciding(document: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the result, as {dotted key: value}: everything but the texts."""
    return without_full_precision(dotted({key: value for key, value in document.items() if key not in TEXTS}))


def dotted(document: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """A nested document as {dotted key: value}."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        inner = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{path}{key}.") if inner else {f"{path}{key}": value}
    return flat


# Extending and sweeping


def _extended(name: str, beside: Traversable | None = None, path: tuple[str, ...] = ()) -> Document:
    """The document with the recipe it extends merged in; `sweep` is still in it."""
    name, _, row = (name, "", "") if name.endswith(FILE_ENDINGS) else name.partition("#")
    file = find_recipe(name, beside)
    if str(file) in path:
        circle = (*path[path.index(str(file)) :], str(file))
        chain = " extends ".join("/".join(Path(place).with_suffix("").parts[-2:]) for place in circle)
        raise UserError(f"recipe '{name}' extends itself ({chain}); remove one `extends`")
    document = dict(parse_recipe(read_text(file, name), name))
    parent, base = document.pop("extends", None), Document()
    if parent is not None:
        if not isinstance(parent, str):
            raise UserError(f"recipe '{name}': extends takes the name of one recipe, or name#row; got {parent!r}")
        base = _extended(parent, file, (*path, str(file)))
    document = merge(base, translate(document, base, f"recipe '{name}'"))
    return _with_row(document, name, row) if row else document


def _sweep(document: Mapping[str, Any], where: str) -> dict[str, list[Mapping[str, Any]]]:
    """Row name to its overrides, one per axis."""
    axes = document.get("sweep")
    if axes is None:
        return {}
    good = isinstance(axes, list) and axes and all(isinstance(axis, Mapping) and axis for axis in axes)
    if not good or not all(value is None or isinstance(value, Mapping) for axis in axes for value in axis.values()):
        raise UserError(
            f"recipe '{where}': sweep must be a list of axes, each a mapping from a part of a row's name to overrides, "
            "e.g. [{pgd-at: {}, trades: {objective.beta: 6}}]"
        )
    found: dict[str, list[Mapping[str, Any]]] = {}
    for parts in itertools.product(*(axis.items() for axis in axes)):
        row = "".join(part for part, _ in parts)
        if not row or row in found:
            raise UserError(f"recipe '{where}': two rows of its sweep, or one without a name, are called '{row}'")
        found[row] = [overrides or {} for _, overrides in parts]
    return found


def _with_row(document: Document, where: str, row: str | None) -> Document:
    found = _sweep(document, where)
    plain = {key: value for key, value in document.items() if key != "sweep"}
    if not found and row is None:
        return plain
    there = ", ".join(found)
    if not found:
        raise UserError(f"recipe '{where}' is a single training and has no row '{row}'; leave the row out")
    if row is None:
        raise UserError(f"recipe '{where}' is a table; choose one of its rows with --row: {there}")
    if row not in found:
        raise UserError(f"recipe '{where}' has no row '{row}'; it has: {there}{nearest_names(row, found)}")
    for overrides in found[row]:
        plain = _with_dotted(plain, translate(overrides, plain, f"row '{row}' of recipe '{where}'"))
    return plain


def _with_dotted(document: Document, overrides: Mapping[str, Any]) -> Document:
    for key in _uses_first(overrides):
        path, value = _path(key, document), overrides[key]
        if value is not None or _found(path, document) >= len(path) - 1:  # a null must not add a section
            document = merge(document, _nested(path, value))
    return document


def _found(path: Sequence[str], document: Mapping[str, Any]) -> int:
    """How many leading keys of the path exist."""
    here: Any = document
    for place, key in enumerate(path):
        if not isinstance(here, Mapping):
            return place - 1
        if key not in here:
            return place
        here = here[key]
    return len(path)


def _uses_first(keys: Iterable[str]) -> list[str]:
    """The keys in the given order, so that the last wins, but every `use` before its settings, which it resets."""
    ordered = list(keys)
    for key in [key for key in ordered if key.endswith(".use")]:
        section = key.removesuffix("use")
        ordered.remove(key)
        ordered.insert(next((at for at, each in enumerate(ordered) if each.startswith(section)), len(ordered)), key)
    return ordered


# Overrides


def _pairs(overrides: Sequence[str] | Mapping[str, object]) -> list[tuple[str, Any]]:
    if isinstance(overrides, Mapping):
        wrong = next((key for key in overrides if not isinstance(key, str)), None)
        if wrong is not None:
            raise UserError(f"keys of overrides must be texts such as 'train.epochs', got {wrong!r}")
        return [(key, convert_numbers(value)) for key, value in overrides.items()]
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"'{text[:80]}' is not an override; write key=value, e.g. train.epochs=3 or threat.eps=4/255"
            )
        if key.count(".") > _MOST_LEVELS:
            raise UserError(f"'{key[:80]}' has {key.count('.')} dots; the keys of a recipe have at most {_MOST_LEVELS}")
        try:
            pairs.append((key.strip(), convert_numbers(read_yaml(value, f"the value of '{text}'"))))
        except UserError as mistake:
            raise UserError(f"{key.strip()}: {mistake}") from mistake
    return pairs


def _path(key: str, document: Mapping[str, Any]) -> list[str]:
    """Split 'plugins.awp.gamma' into keys, spelled as in the document; dashes and underscores are the same.

    Keys that contain dots, such as a user's class, are kept whole.
    """
    parts, path = key.split("."), []
    here: Any = document
    while parts:
        spelled = {each.replace("-", "_"): each for each in here} if isinstance(here, Mapping) else {}
        starts = [(n, ".".join(parts[:n])) for n in range(len(parts), 0, -1)]
        length, found = next(((n, start) for n, start in starts if start.replace("-", "_") in spelled), starts[-1])
        path.append(spelled.get(found.replace("-", "_"), found))
        here = here.get(path[-1]) if isinstance(here, Mapping) else None
        parts = parts[length:]
    return path


def _removes_unknown(path: Sequence[str], document: Mapping[str, Any]) -> bool:
    """Whether a null override removes a key that does not exist, which is then reported when the recipe is built.

    Built-in plug-ins and their settings may be removed from any recipe; keeping the null would switch the plug-in on.
    """
    if path[0] not in _COMPONENTS or len(path) < 2:
        return False
    there = _found(path, document)
    return there < len(path) and (path[0] != "plugins" or there > 1 or not _has_plugin(*path[1:3]))


def _has_plugin(name: str, setting: str | None = None) -> bool:
    from vitadel.training.recipes.instantiate import find_component  # imports torch

    try:
        takes = inspect.signature(find_component("plug-in", name)).parameters
    except UserError:
        return False
    return setting is None or setting.replace("-", "_") in takes


def _nested(path: Sequence[str], value: Any) -> Document:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def unknown_section(key: str, document: Mapping[str, Any]) -> str:
    """The message for an unknown section: what there is, and which section has such a key or what it resembles."""
    known = [*TEXTS, "extends", "sweep", *(PROBE_SECTIONS if is_probe(document) else SECTIONS)]
    meant = OTHER_WORDS.get(key, key)
    homes = [f"{section}.{meant}" for section, cls in section_types(document).items() if meant in get_type_hints(cls)]
    near = f"; did you mean {', '.join(homes)}?" if homes else nearest_names(key, known)
    return f"it has no '{key}'; there is {', '.join(known)}{near}"


def _without_nulls(document: Mapping[str, Any]) -> Document:
    """Remove keys that are null, except where null is a value (`audit.limit: null` means all images).

    Nulls of unknown keys stay, to be reported. Sections are put into their usual order.
    """
    result: Document = {}
    types = section_types(document)
    for key in sorted(document, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER)):
        value = document[key]
        if value is None and key in _ORDER:
            continue
        if isinstance(value, Mapping):
            stay = [inner for inner, entry in value.items() if entry is not None or _null_stays(types, key, inner)]
            value = {inner: _pruned(value[inner]) for inner in stay}
        result[key] = value.strip() if key in TEXTS and isinstance(value, str) else value
    return result


def _pruned(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _pruned(entry) for key, entry in value.items() if entry is not None}


def _null_stays(types: Mapping[str, type], section: str, key: str) -> bool:
    if section not in types:
        return False
    hints = get_type_hints(types[section])
    return NoneType in get_args(hints.get(key)) or key not in (*hints, "use")
