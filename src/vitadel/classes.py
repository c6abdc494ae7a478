"""Match the classes of data with the outputs of a model: by name, WordNet id, or synonym.

Names are text; nothing here needs a model. `match_classes` says which output each class of the data is, or refuses with
what to pass instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitadel.errors import UserError, nearest_names
from vitadel.quantities import are_numbers

AMONG = ("all", "data")
"""Which outputs a model chooses from: all of them, or those of the data's classes."""
_WNID = re.compile(r"(n\d{8})(?!\d)|.*\((n\d{8})\)$")
_SHARE_IN_ORDER = 0.9  # of all names, where the rest is spelled in ways that no list has
_SHOWN = 3
_WAYS = ("name", "WordNet id", "description", "first synonym", "synonym")

Synonyms = Callable[[str], Sequence[str]]
"""A WordNet id -> its lemmas, the most usual first; empty for an unknown id."""


@dataclass(frozen=True)
class ClassNames:
    """The names of a model's outputs, in their order, and where they are known from."""

    names: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class ClassMapping:
    """Which output of the model each class of the data is.

    `assumption` says what was taken for granted, `doubt` what may be wrong; both are empty where all names match.
    """

    data: tuple[str, ...]
    outputs: tuple[int, ...]
    of: int
    ways: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # of the model's outputs, where they are known
    origin: str = ""
    assumption: str = ""
    doubt: str = ""

    @property
    def in_order(self) -> bool:
        """Whether labels are output numbers already."""
        return self.outputs == tuple(range(len(self.outputs)))

    @property
    def changes_labels(self) -> bool:
        return not self.in_order or len(self.outputs) != self.of

    def summary(self, among: str = "all") -> dict[str, Any]:
        """The field `class_mapping` of the results."""
        names = self.names or self.data
        rows = [
            {"data": name, "output": output, "model": names[output] if output < len(names) else str(output)}
            for name, output in zip(self.data, self.outputs, strict=True)
        ]
        return {
            "matched_by": sorted({*self.ways}, key=_order) or ["position"],
            "model_classes_from": self.origin or None,
            "judged_among": self.judged_among(among),
            "outputs": self.of,
            "in_order": self.in_order,
            "classes": rows,
        }

    def judged_among(self, among: str) -> str:
        if among == "data" and len(self.outputs) < self.of:
            return f"the data's {len(self.outputs)} of {self.of} classes"
        return f"all {self.of} classes"

    def sentence(self, among: str = "all") -> str:
        """What is shown when a run starts."""
        count, way = len(self.outputs), " and ".join(sorted({*self.ways}, key=_order)) or "position"
        names = self.names or self.data
        first = [f"{self.data[row]} is {names[self.outputs[row]]} ({self.outputs[row]})" for row in range(count)]
        shown = ", ".join(first[:_SHOWN]) + (", ..." if count > _SHOWN else "")
        known = f" ({self.origin})" if self.origin else ""
        return (
            f"{count} classes of the data matched with {self.of} outputs{known} by {way}: {shown}; judged among "
            f"{self.judged_among(among)}"
        )


def _order(way: str) -> int:
    return _WAYS.index(way) if way in _WAYS else len(_WAYS)


def match_classes(
    data: Sequence[str], model: ClassNames | None, outputs: int | None, synonyms: Synonyms = lambda wnid: ()
) -> ClassMapping | None:
    """The mapping from the data's classes to the model's outputs; None where labels can only be output numbers.

    `outputs` is the number of the model's outputs, where that is known. A `UserError` if the classes cannot be matched
    one to one and their numbers differ, so that labels would mean other classes than outputs do.
    """
    if outputs is None and model is not None:
        outputs = len(model.names)
    if outputs is None or are_numbers(data) or len(data) > outputs:
        return None  # labels outside the outputs are refused where samples are selected
    if model is not None and len(model.names) != outputs:
        raise UserError(
            f"there are {len(model.names)} class names for a model with {outputs} outputs (from {model.origin}). "
            "Give a file with one name per output, in their order: --classes FILE."
        )
    if model is None:
        return _by_position(data, outputs)
    found = _Matches(data, model.names, synonyms)
    if len(data) == outputs and found.in_place >= _SHARE_IN_ORDER * len(data) and not found.elsewhere:
        return _mapping(data, model, range(outputs), found.ways_in_place())
    if not found.missing and not found.ambiguous:
        return _mapping(data, model, found.chosen, found.ways)
    if len(data) == outputs and not found.elsewhere and not found.ambiguous:
        return _by_position(data, outputs, model, len(found.missing))
    raise UserError(_refusal(data, model, found))


def _mapping(data: Sequence[str], model: ClassNames, chosen: Sequence[int], ways: Sequence[str]) -> ClassMapping:
    twice = {output for output in chosen if list(chosen).count(output) > 1} if len({*chosen}) < len(chosen) else set()
    if twice:
        output = min(twice)
        both = [name for name, other in zip(data, chosen, strict=True) if other == output]
        raise UserError(
            f"the classes {' and '.join(map(repr, both))} of the data are one class of the model, {output} "
            f"('{model.names[output]}'): a mapping must be one to one. Join these classes in the data, or give "
            "--classes FILE with one name per output."
        )
    order = "" if list(chosen) == sorted(chosen) else "the order of the classes differs between data and model"
    return ClassMapping(
        tuple(data), tuple(chosen), len(model.names), tuple(ways), model.names, model.origin, assumption=order
    )


class _Matches:
    """For each class of the data the output that it names, by the strongest kind of match."""

    def __init__(self, data: Sequence[str], model: Sequence[str], synonyms: Synonyms) -> None:
        self.data = data
        places: dict[str, dict[int, int]] = {}
        for number, name in enumerate(model):
            for alias, level in _aliases(name, synonyms).items():
                places.setdefault(alias, {})[number] = level
        self.known = sorted(places)
        self.levels: list[dict[int, int]] = []  # of all outputs that a class may be
        self.candidates: list[dict[int, int]] = []  # of those by the strongest kind of match
        for name in data:
            levels: dict[int, int] = {}
            for alias, level in _aliases(name, synonyms).items():
                for number, other in places.get(alias, {}).items():
                    levels[number] = min(levels.get(number, len(_WAYS)), max(level, other))
            best = min(levels.values(), default=0)
            self.levels.append(levels)
            self.candidates.append({number: level for number, level in levels.items() if level == best})

    @property
    def missing(self) -> list[str]:
        return [name for name, found in zip(self.data, self.candidates, strict=True) if not found]

    @property
    def ambiguous(self) -> dict[str, list[int]]:
        return {name: sorted(found) for name, found in zip(self.data, self.candidates, strict=True) if len(found) > 1}

    @property
    def in_place(self) -> int:
        """How many classes are matched, perhaps among others, with the output of their own number."""
        return sum(number in found for number, found in enumerate(self.levels))

    @property
    def elsewhere(self) -> int:
        """How many are matched with other outputs only."""
        return sum(bool(found) and number not in found for number, found in enumerate(self.levels))

    @property
    def chosen(self) -> list[int]:
        return [next(iter(found)) for found in self.candidates]

    @property
    def ways(self) -> list[str]:
        return [_WAYS[next(iter(found.values()))] for found in self.candidates]

    def ways_in_place(self) -> list[str]:
        return [_WAYS[found[number]] if number in found else "position" for number, found in enumerate(self.levels)]


def _plain(name: str) -> str:
    return " ".join(re.sub(r"[_\-]+", " ", name).casefold().split())


def _aliases(name: str, synonyms: Synonyms) -> dict[str, int]:
    """Texts by which a class may be called, and how strong a match by each is: its place in `_WAYS`."""
    found = {_plain(name): 0}
    wnid = _WNID.match(name)
    if wnid is None:
        if "," in name:  # several synonyms in one name, as in lists of ImageNet's classes
            for number, part in enumerate(name.split(",")):
                found.setdefault(_plain(part), 3 if number == 0 else 4)
        return found
    identifier = wnid.group(1) or wnid.group(2)
    found.setdefault(identifier, 1)
    lemmas = list(synonyms(identifier))
    found.setdefault(_plain(", ".join(lemmas)), 2)
    for number, lemma in enumerate(lemmas):
        found.setdefault(_plain(lemma), 3 if number == 0 else 4)
    return {alias: level for alias, level in found.items() if alias}


def _by_position(data: Sequence[str], outputs: int, model: ClassNames | None = None, unknown: int = 0) -> ClassMapping:
    """Class k of the data is output k, because nothing else is known; refused if the numbers differ."""
    count = len(data)
    if count < outputs:
        raise UserError(
            f"the data has {count} classes ({_some(data)}) and the model {outputs} outputs, whose classes are not "
            "known: labels 0 to "
            f"{count - 1} would be judged as outputs 0 to {count - 1}, whatever these are. Give the names of the "
            "outputs with --classes FILE (one per line, in their order), or keep the outputs of these classes with "
            "--head-classes LIST; folders of WordNet ids for an ImageNet model are also read by imagenet:DIR."
        )
    numbers = all(name.isdecimal() for name in data)
    if model is not None:
        what = f"none of the {count} class names" if unknown == count else f"{unknown} of the {count} class names"
        doubt = (
            f"{what} of the data ({_some(data)}) is known to the model ({_some(model.names)}, from {model.origin}); "
            "classes were taken in their order"
        )
    elif numbers:
        doubt = f"the classes of the data are numbers sorted as text ({_some(data)}), taken as outputs 0, 1, 2, ..."
    else:
        doubt = ""
    assumed = f"class k of the data, in the order of the names ({_some(data)}), is output k of the model"
    names = () if model is None else model.names
    origin = "" if model is None else model.origin
    return ClassMapping(tuple(data), tuple(range(count)), outputs, (), names, origin, assumed, doubt)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _refusal(data: Sequence[str], model: ClassNames, found: _Matches) -> str:
    start = f"the data's {len(data)} classes cannot be matched with the model's {len(model.names)} ({model.origin}): "
    remedy = (
        " Rename them (a WordNet id is never ambiguous), or give --classes FILE with one name per output, or a JSON "
        "object from each class of the data to its output; --head-classes LIST keeps some outputs."
    )
    if found.ambiguous:
        name, numbers = next(iter(found.ambiguous.items()))
        options = " or ".join(f"output {number} ({model.names[number]})" for number in numbers[:_SHOWN])
        return f"{start}'{name}' could be {options}.{remedy}"
    if len(found.missing) == len(data):
        return (
            f"{start}none of the data's names ({_some(data)}) is one of the model's ({_some(model.names)}), so labels "
            f"would be judged as other classes.{remedy}"
        )
    name = found.missing[0]
    near = nearest_names(_plain(name), found.known) or ""
    more = f" (and {len(found.missing) - 1} more)" if len(found.missing) > 1 else ""
    return f"{start}'{name}'{more} is no name or synonym of a class of the model{near}.{remedy}"


def read_class_list(path: Path) -> tuple[str, ...] | dict[str, int | str]:
    """The names of a model's outputs: one per line, a JSON list, or a JSON object such as {"0": "tench"}.

    A JSON object with other keys maps each class of the data to an output, by number or name.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else text.splitlines()
    except (OSError, ValueError, RecursionError) as fault:
        raise UserError(
            f"the class names in '{path}' cannot be read: {fault}; expected text with one name per line, or JSON"
        ) from None
    if isinstance(content, list):
        names = tuple(str(name).strip() for name in content if str(name).strip())
        return _one_each(names, path)
    if not isinstance(content, dict) or not content:
        raise UserError(f"'{path}' holds no class names; expected one per line, a JSON list or a JSON object")
    if all(str(key).isdecimal() for key in content):
        numbers = {int(key): str(name) for key, name in content.items()}
        if sorted(numbers) != list(range(len(numbers))):
            raise UserError(
                f"'{path}' must name the outputs 0 to {len(numbers) - 1}, each once; got {_some([*content])}"
            )
        return _one_each(tuple(numbers[number] for number in range(len(numbers))), path)
    return {str(name): output for name, output in content.items()}


def _one_each(names: tuple[str, ...], path: Path) -> tuple[str, ...]:
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None or not names:
        fault = "is empty" if twice is None else f"names '{twice}' twice"
        raise UserError(f"'{path}' {fault}; expected one name per output of the model, each different")
    return names


def mapping_from(
    pairs: Mapping[str, int | str], data: Sequence[str], outputs: int, model: ClassNames | None
) -> ClassMapping:
    """The mapping that a user wrote: a class of the data -> its output, by number or by the output's name."""
    missing = [name for name in data if name not in pairs]
    if missing:
        raise UserError(
            f"the class mapping names no output for '{missing[0]}' (and {len(missing) - 1} more); every class of the "
            f"data needs one: {_some(data)}"
        )
    names = () if model is None else model.names
    chosen = []
    for name in data:
        value = pairs[name]
        if isinstance(value, str) and value in names:
            value = names.index(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < outputs:
            raise UserError(
                f"the class mapping gives {value!r} for '{name}'; expected an output from 0 to {outputs - 1}"
                f"{', or its name' if names else ''}"
            )
        chosen.append(value)
    known = model or ClassNames(tuple(map(str, range(outputs))), "")
    return _mapping(data, ClassNames(known.names, known.origin or "--classes"), chosen, ["--classes"] * len(chosen))
