"""Recipes are YAML documents: find one, merge in what it extends, pick a row of its sweep, apply key=value."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import yaml

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import read_quantity
from vitadel.training.recipes.old_keys import translate

__all__ = [
    "IDLE",
    "OTHER_WORDS",
    "PROBE_SECTIONS",
    "SECTIONS",
    "TEXTS",
    "compose",
    "deciding",
    "dotted",
    "is_probe",
    "merge",
    "rows",
    "section_types",
    "shipped_recipes",
    "source",
    "texts",
    "unknown_section",
]

Document = dict[str, Any]

TEXTS = ("about", "paper", "expected", "hardware")
"""What a recipe says to people; `expected` is what the paper reports, `hardware` on what and in how many hours."""

IDLE = (*TEXTS, "data.workers", "train.tracker", "train.checkpoint_every")
"""Keys that leave the result as it is: a run may go on with others."""

OTHER_WORDS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "max_norm": "clip_grad_norm",
    "clip_grad": "clip_grad_norm",
    "opt": "name",
    "sched": "shape",
    "grad_accum_steps": "grad_accum",
    "amp": "amp_dtype",
    "aa": "auto_augment",
    "random_erasing": "reprob",
    "smoothing": "label_smoothing",
    "num_workers": "workers",
    "lambda": "beta",
}
"""What PyTorch, timm and papers also call some of the keys, where no spelling leads from one to the other."""

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
"""What a recipe says to the machine."""

_BUILT = ("objective", "plugins", "adapter")  # which keys they have depends on what they name

PROBE_SECTIONS = ("model", "tokens", "data", "head", "train", "audit")
"""What a recipe for a head on frozen features says to the machine; `tokens` is a file, the others are sections."""

_ORDER = TEXTS + PROBE_SECTIONS[:-2] + tuple(name for name in SECTIONS if name not in PROBE_SECTIONS[:-2])
_FILE = (".yaml", ".yml")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?( ?/ ?(\d+\.?\d*|\.\d+))?", re.IGNORECASE)


def is_probe(document: Mapping[str, Any]) -> bool:
    """Whether a recipe trains a head on frozen features (`vitadel probe`) or a model (`vitadel harden`)."""
    return "head" in document


def section_types(document: Mapping[str, Any] | None = None) -> dict[str, type]:
    """The dataclasses behind the sections; the fields of the objective and of plug-ins depend on which they are.

    Of a recipe for a head they are those of its kind of head.
    """
    # Composing is for lists and help too, which should not wait for torch.
    from vitadel.training.recipes import sections

    if document is not None and is_probe(document):
        from vitadel.heads.recipe_sections import probe_types

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


def shipped_recipes() -> list[str]:
    """The recipes that come with the package, as 'paper/job'."""
    folders = [folder for folder in _shelf().iterdir() if folder.is_dir()]
    files = [f"{folder.name}/{file.name}" for folder in folders for file in folder.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def source(name: str) -> str:
    """A recipe as it stands in its file, with its comments."""
    return _text(_find(name), name)


def texts(name: str) -> dict[str, str]:
    """What a recipe says to people, whichever its row."""
    document = _unfolded(name)
    return {key: str(document[key]).strip() for key in TEXTS if document.get(key)}


def rows(name: str) -> list[str]:
    """The rows of its sweep, in order; none for a recipe of a single training."""
    return list(_sweep(_unfolded(name), name))


def compose(name: str | Path, row: str | None = None, overrides: Sequence[str] | Mapping[str, object] = ()) -> Document:
    """The whole recipe as one plain document, without `extends` and `sweep`.

    `name` is that of a shipped recipe or a path to a .yaml file. `overrides` are texts 'train.epochs=3' or a mapping
    {'train.epochs': 3}; values are read as YAML, fractions as numbers. A null takes a key away. Keys that there are not
    are told when the document is built, with all else that is wrong.
    """
    if not isinstance(name, str | Path):
        raise UserError(
            f"a recipe is given by its name or the path of its file, got a {type(name).__name__}; a model of your own "
            "is named in it, as model.name: python:module:function"
        )
    document = _with_row(_unfolded(str(name)), str(name), row)
    asked = translate(dict(_pairs(overrides)), document, "overrides")
    idle = [_path(key, document) for key, value in asked.items() if value is None]
    kept = (_nested(path, None) for path in idle if _takes_nothing_away(path, document))
    return reduce(merge, kept, _without_nulls(_with_dotted(document, asked)))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Document:
    """`over` wins, key by key and mapping by mapping; lists are replaced.

    A mapping that names another `use` replaces the old one whole: settings of one objective say nothing about another.
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
    """The settings that decide what comes out, one key per value: all but what is said to people."""
    return dotted({key: value for key, value in document.items() if key not in TEXTS})


def dotted(document: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """One key per value, so that a run that cannot go on can be told by the keys that differ."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        inner = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{path}{key}.") if inner else {f"{path}{key}": value}
    return flat


# Finding and reading files


def _shelf() -> Traversable:
    return resources.files("vitadel") / "recipes"


def _find(name: str, beside: Traversable | None = None) -> Traversable:
    """The file of a recipe; a path is taken from the folder of the file that names it, or else the working folder."""
    if name.endswith(_FILE):
        path = Path(name).expanduser()
        if isinstance(beside, Path):
            path = beside.parent / path
        if not path.is_file():
            raise UserError(f"there is no recipe file '{path}'; make one with `vitadel recipes copy NAME {name}`")
        return path
    known = shipped_recipes()
    if name not in known:
        raise UserError(
            f"unknown recipe '{name}'{nearest_names(name, known) or '.'} See `vitadel list recipes`; "
            "a file of your own is given by its path, ending in .yaml"
        )
    return _shelf() / f"{name}.yaml"


def _text(file: Traversable, name: str) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe '{name}' cannot be read: {error}") from error


@lru_cache(maxsize=256)
def _parsed(text: str, name: str) -> Mapping[str, Any]:
    """Cached, as a list of all recipes reads those that others extend again and again; not to be changed in place."""
    document = _read_yaml(text, f"recipe '{name}'")
    if not isinstance(document, dict):
        raise UserError(
            f"recipe '{name}' is not a document of keys and values; see `vitadel recipes show shapes/pgd-at`"
        )
    return {str(key): value if key in TEXTS else _with_numbers(value) for key, value in document.items()}


def _read_yaml(text: str, what: str) -> Any:
    try:
        _check_node(yaml.compose(text, Loader=yaml.SafeLoader), what)
        return yaml.safe_load(text)
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{what} is nested too deeply to be read") from None
    except Exception as error:  # values such as !!int x or 2020-99-99 raise whatever Python raises for them
        raise UserError(f"{what} is not readable as YAML: {error}") from error


def _check_node(node: yaml.Node | None, what: str, around: tuple[yaml.Node, ...] = ()) -> None:
    """Of two equal keys YAML's reader keeps the last without a word; lists that hold themselves it makes gladly."""
    if any(node is outer for outer in around):
        raise UserError(f"{what} has something that contains itself in line {around[-1].start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # others are refused when the document is made
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise UserError(
                        f"{what} has '{key.value}' twice in one place, again in line {line}; keep one of them"
                    )
                seen.add(key.value)
            _check_node(value, what, (*around, node))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_node(value, what, (*around, node))


def _with_numbers(value: Any) -> Any:
    """Fractions as numbers, and 1e-3, which YAML takes for a text; numpy's numbers, which no file of ours can hold."""
    if isinstance(value, Mapping):
        return {str(key): _with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value) and ("/" in value or "e" in value.lower()):
        return read_quantity(value)
    single = isinstance(value, np.generic) or getattr(value, "ndim", None) == 0  # also a tensor of one number
    return value.item() if single else value


# Extending and sweeping


def _unfolded(name: str, beside: Traversable | None = None, path: tuple[str, ...] = ()) -> Document:
    """The document with what it extends merged in; `sweep` still in it."""
    name, _, row = (name, "", "") if name.endswith(_FILE) else name.partition("#")
    file = _find(name, beside)
    if str(file) in path:
        circle = (*path[path.index(str(file)) :], str(file))
        chain = " extends ".join("/".join(Path(place).with_suffix("").parts[-2:]) for place in circle)
        raise UserError(f"recipe '{name}' extends itself in the end ({chain}); break the circle")
    document = dict(_parsed(_text(file, name), name))
    parent, base = document.pop("extends", None), Document()
    if parent is not None:
        if not isinstance(parent, str):
            raise UserError(f"recipe '{name}': extends takes the name of one recipe, or name#row; got {parent!r}")
        base = _unfolded(parent, file, (*path, str(file)))
    document = merge(base, translate(document, base, f"recipe '{name}'"))
    return _with_row(document, name, row) if row else document


def _sweep(document: Mapping[str, Any], where: str) -> dict[str, list[Mapping[str, Any]]]:
    """Row name -> the overrides that make it, one per axis."""
    axes = document.get("sweep")
    if axes is None:
        return {}
    good = isinstance(axes, list) and axes and all(isinstance(axis, Mapping) and axis for axis in axes)
    if not good or not all(value is None or isinstance(value, Mapping) for axis in axes for value in axis.values()):
        raise UserError(
            f"recipe '{where}': sweep is a list of axes, each a mapping from a part of the row's name to the keys that "
            "it overrides, e.g. [{pgd-at: {}, trades: {objective.beta: 6}}]"
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
        if (
            value is not None or _found(path, document) >= len(path) - 1
        ):  # or a null would make what it is to be taken from
            document = merge(document, _nested(path, value))
    return document


def _found(path: Sequence[str], document: Mapping[str, Any]) -> int:
    """How many keys of the path there are; those before the last one must lead to mappings."""
    here: Any = document
    for place, key in enumerate(path):
        if not isinstance(here, Mapping):
            return place - 1
        if key not in here:
            return place
        here = here[key]
    return len(path)


def _uses_first(keys: Iterable[str]) -> list[str]:
    """In the order given, so that the last wins; but a `use` before its settings, which another one takes away."""
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
            raise UserError(f"overrides are named by texts such as 'train.epochs', got {wrong!r}")
        return [(key, _with_numbers(value)) for key, value in overrides.items()]
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"'{text}' is no override; write key=value, e.g. train.epochs=3 or threat.eps=4/255")
        try:
            pairs.append((key.strip(), _with_numbers(_read_yaml(value, f"the value of '{text}'"))))
        except UserError as mistake:
            raise UserError(f"{key.strip()}: {mistake}") from mistake
    return pairs


def _path(key: str, document: Mapping[str, Any]) -> list[str]:
    """'plugins.awp.gamma' taken apart, spelled as in the document, where dashes and underscores are the same.

    Keys with dots of their own, such as a user's class, are found whole.
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


def _takes_nothing_away(path: Sequence[str], document: Mapping[str, Any]) -> bool:
    """Whether a null names what is not there, in a section whose keys only its builder knows: it is to tell that.

    A plug-in that exists may be taken away from any recipe, as may its settings; a null for them would switch it on.
    """
    if path[0] not in _BUILT or len(path) < 2:
        return False
    there = _found(path, document)
    return there < len(path) and (path[0] != "plugins" or there > 1 or not _has_plugin(*path[1:3]))


def _has_plugin(name: str, setting: str | None = None) -> bool:
    from vitadel.training.recipes.components import find_component  # it imports all of them, and torch

    try:
        takes = inspect.signature(find_component("plugins", name)).parameters
    except UserError:
        return False
    return setting is None or setting.replace("-", "_") in takes


def _nested(path: Sequence[str], value: Any) -> Document:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def unknown_section(key: str, document: Mapping[str, Any]) -> str:
    """What to say of a key that no recipe has: what there is, and which section has it, or what it resembles."""
    known = [*TEXTS, "extends", "sweep", *(PROBE_SECTIONS if is_probe(document) else SECTIONS)]
    meant = OTHER_WORDS.get(key, key)
    homes = [f"{section}.{meant}" for section, cls in section_types(document).items() if meant in get_type_hints(cls)]
    near = f"; did you mean {', '.join(homes)}?" if homes else nearest_names(key, known)
    return f"it has no '{key}'; there is {', '.join(known)}{near}"


def _without_nulls(document: Mapping[str, Any]) -> Document:
    """A null takes a key away, but is a value where a section says so: `audit.limit: null` means all images.

    It stays where there is no such key, which is to be told and not passed over. Sections come in their usual order,
    whichever document had them first.
    """
    settled: Document = {}
    types = section_types(document)
    for key in sorted(document, key=lambda key: _ORDER.index(key) if key in _ORDER else len(_ORDER)):
        value = document[key]
        if value is None and key in _ORDER:
            continue
        if isinstance(value, Mapping):
            stay = [inner for inner, entry in value.items() if entry is not None or _null_stays(types, key, inner)]
            value = {inner: _pruned(value[inner]) for inner in stay}
        settled[key] = value.strip() if key in TEXTS and isinstance(value, str) else value
    return settled


def _pruned(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _pruned(entry) for key, entry in value.items() if entry is not None}


def _null_stays(types: Mapping[str, type], section: str, key: str) -> bool:
    if section not in types:
        return False
    hints = get_type_hints(types[section])
    return NoneType in get_args(hints.get(key)) or key not in (*hints, "use")
