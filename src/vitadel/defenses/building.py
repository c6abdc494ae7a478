"""From a recipe's document to the objects it means; whatever is wrong with it is told at once."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from vitadel.attacks.names import make, split_attack_list
from vitadel.data.spec import DATA_KINDS
from vitadel.defenses import shapes
from vitadel.defenses.checking import (
    check_model_name,
    check_optimiser,
    check_rand_augment,
    class_count,
    model_fault,
    read_data_spec,
)
from vitadel.defenses.components import component_names, find_component
from vitadel.defenses.recipes import SECTIONS, TEXTS, compose, rows, section_types
from vitadel.defenses.sections import (
    AuditSection,
    Augmentation,
    DataSection,
    ModelSection,
    Optimiser,
    Schedule,
    ThreatSection,
    TrainSection,
    Validation,
)
from vitadel.defenses.shapes import Objective, Plugin
from vitadel.errors import Mistake, nearest_names
from vitadel.types import Attack, Calibrated

__all__ = ["Faulty", "Recipe", "build_check", "build_recipe", "check_recipe"]

Made = TypeVar("Made")

_NEEDED = ("model", "data", "objective", "train")
_PLUGIN_SHAPES = (
    shapes.BeforeEpoch,
    shapes.AfterEpoch,
    shapes.ChangesAttack,
    shapes.AroundStep,
    shapes.AfterStep,
    shapes.ChangesEvaluation,
    shapes.Prepares,
)


class Faulty(Mistake):
    """All that is wrong with one recipe, or one row of it."""

    def __init__(self, where: str, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        problems = "1 problem" if len(self.faults) == 1 else f"{len(self.faults)} problems"
        super().__init__("\n  - ".join([f"recipe {where} has {problems}:", *self.faults]))


@dataclass(frozen=True)
class Recipe:
    """A recipe ready to be trained: its sections, and the objective and plug-ins they name.

    `about` holds its texts, `document` the plain composed document that it was built from.
    """

    about: dict[str, str]
    model: ModelSection
    data: DataSection
    augmentation: Augmentation
    threat: ThreatSection
    objective: Objective
    plugins: tuple[tuple[str, Plugin], ...]
    optimiser: Optimiser
    schedule: Schedule
    train: TrainSection
    validation: Validation
    audit: AuditSection
    document: dict[str, Any]


@dataclass
class _Faults:
    """Found so far, in the order in which they are told."""

    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        return [*self.unknown, *self.missing, *self.wrong]

    def attempt(self, path: str, function: Callable[..., Made], *arguments: object, **named: object) -> Made | None:
        """What the call gives, or its mistake noted under `path`."""
        try:
            return function(*arguments, **named)
        except Mistake as mistake:
            self.wrong.append(f"{path}: {mistake}")
            return None


def build_recipe(document: Mapping[str, Any], where: str) -> Recipe:
    """Build every part but the model and the data; `where` names the recipe in messages.

    Raises one `Faulty` with all faults: keys that do not exist, then those that are missing, then values that are no
    good. Attacks are made with the recipe's own threat.
    """
    faults = _Faults()
    known = [*TEXTS, *SECTIONS]
    for key in document:
        if key not in known:
            faults.unknown.append(f"it has no '{key}'; there is {', '.join(known)}{nearest_names(key, known)}")
    for key in _NEEDED:
        if key not in document:
            faults.missing.append(f"it needs '{key}'")
    for key in TEXTS:
        if key in document and not isinstance(document[key], str):
            faults.wrong.append(f"{key}: should be a text, got {document[key]!r}")
    parts = {
        name: _settled(name, cls, _mapping(name, document.get(name), faults), faults)
        for name, cls in section_types().items()
        if name in document or name not in _NEEDED
    }
    # With a threat that is no good the names of attacks are still worth checking.
    threat = parts["threat"] if isinstance(parts["threat"], ThreatSection) else ThreatSection()
    objective = _objective(document.get("objective"), threat, faults)
    plugins = _plugins(_mapping("plugins", document.get("plugins"), faults), threat, faults)
    _check_values(parts, threat, faults)
    if faults.all():
        raise Faulty(where, faults.all())
    assert objective is not None
    about = {key: document[key] for key in TEXTS if key in document}
    sections = cast(dict[str, Any], parts)
    return Recipe(about=about, objective=objective, plugins=plugins, document=dict(document), **sections)


def build_check(recipe: Recipe, where: str) -> None:
    """Build the model as well, without memory for its weights, and send an image through it; nothing is trained."""
    faults = []
    counts = {name: class_count(spec) for name, spec in _specs(recipe.data).items()}
    known = {name: count for name, count in counts.items() if count is not None}
    if recipe.model.num_classes is not None:
        known["model.num_classes"] = recipe.model.num_classes
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in known.items())
        faults.append(f"data: the numbers of classes do not agree: {told}")
    else:
        classes = next(iter(known.values()), 10)
        fault = model_fault(json.dumps(asdict(replace(recipe.model, num_classes=classes))))
        if fault:
            faults.append(f"model: {fault}")
    if faults:
        raise Faulty(where, faults)


def check_recipe(name: str) -> str | None:
    """What is wrong with a recipe, over all its rows, or None; nothing is trained and no data is opened."""
    try:
        every: list[str | None] = [*rows(name)] or [None]
    except Mistake as mistake:
        return str(mistake)
    found: dict[str, list[str]] = {}
    for row in every:
        where = name if row is None else f"{name} (row {row})"
        try:
            build_check(build_recipe(compose(name, row), where), where)
        except Mistake as mistake:
            for fault in mistake.faults if isinstance(mistake, Faulty) else (str(mistake),):
                found.setdefault(fault, []).append(row or "")
    if not found:
        return None
    return str(Faulty(name, (f"{fault}{_in_rows(places, len(every))}" for fault, places in found.items())))


def _in_rows(places: list[str], total: int) -> str:
    return "" if len(places) == total else f" (row{'s' if len(places) > 1 else ''} {', '.join(places)})"


# Dataclasses from mappings


def _mapping(path: str, value: object, faults: _Faults) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    faults.wrong.append(f"{path}: should be keys with values, got {value!r}")
    return {}


def _settled(
    path: str, cls: Callable[..., Made], given: Mapping[str, Any], faults: _Faults, threat: ThreatSection | None = None
) -> Made | None:
    """`cls` called with the settings; None if any of them is a fault."""
    before = len(faults.all())
    try:
        parameters = inspect.signature(cls).parameters
    except ValueError:  # only of classes that are not written in Python
        faults.wrong.append(f"{path}: {cls} does not tell its settings; make it a dataclass")
        return None
    hints = _hints(cls)
    for key in given:
        if key not in parameters:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes nothing"
            faults.unknown.append(f"{path}: has no '{key}'; {takes}{nearest_names(key, parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in given:
            faults.missing.append(f"{path}: needs '{key}'")
    values = {}
    for key, value in given.items():
        if key in parameters:
            values[key] = _value(f"{path}.{key}", key, hints.get(key), value, faults, threat)
    return faults.attempt(path, cls, **values) if len(faults.all()) == before else None


def _hints(cls: Any) -> dict[str, Any]:
    """Types of the settings; a class of the user's may have some that only exist for type checkers."""
    try:
        return get_type_hints(cls if is_dataclass(cls) else cls.__init__)
    except (NameError, AttributeError, TypeError):
        return {}


def _value(path: str, key: str, hint: Any, value: Any, faults: _Faults, threat: ThreatSection | None) -> Any:
    if threat is not None and (Attack in (hint, *get_args(hint)) or (hint is None and key == "attack")):
        return _training_attack(path, value, threat, faults)
    if path == "audit.attacks" and isinstance(value, str):
        return tuple(faults.attempt(path, split_attack_list, value) or ())
    if hint is None:
        return value
    try:
        # Pydantic turns texts into numbers, which is welcome, and true into 1, which is not.
        return TypeAdapter(hint).validate_python(value, strict=isinstance(value, bool))
    except ValidationError as error:
        for fault in error.errors():
            place = "".join(f"[{part}]" for part in fault["loc"] if isinstance(part, int))
            faults.wrong.append(f"{path}{place}: {fault['msg'].removeprefix('Input ')}, got {fault['input']!r}")
        return None


def _training_attack(path: str, name: object, threat: ThreatSection, faults: _Faults) -> Attack | None:
    if name is None:
        return None
    attack = _attack(path, name, threat, faults)
    made: object = attack
    if isinstance(made, Calibrated):
        faults.wrong.append(
            f"{path}: '{name}' first studies the model on other images, which an attack inside training cannot; "
            "training against scaled attention is the plug-in attention_scaling"
        )
    return attack


def _attack(path: str, name: object, threat: ThreatSection, faults: _Faults) -> Attack | None:
    if not isinstance(name, str):
        faults.wrong.append(f"{path}: should be the name of an attack, e.g. pgd-10(step=2/255), got {name!r}")
        return None
    return faults.attempt(path, make, name, eps=threat.eps, norm=threat.norm)


# Objectives and plug-ins


def _objective(section: object, threat: ThreatSection, faults: _Faults) -> Objective | None:
    if section is None:
        return None  # told as a missing section
    given = dict(_mapping("objective", section, faults))
    name = given.pop("use", None)
    if not isinstance(name, str):
        faults.missing.append(f"objective: needs 'use', one of {', '.join(component_names('objectives'))}")
        return None
    cls = faults.attempt("objective", find_component, "objectives", name)
    made = cls and _settled("objective", cls, given, faults, threat)
    if made is not None and not (callable(made) and hasattr(made, "attack")):
        faults.wrong.append(f"objective: '{name}' is not one: it cannot be called, or has no `attack`")
    return cast(Objective | None, made)


def _plugins(section: Mapping[str, Any], threat: ThreatSection, faults: _Faults) -> tuple[tuple[str, Plugin], ...]:
    plugins: list[tuple[str, Plugin]] = []
    for name, settings in section.items():
        path = f"plugins.{name}"
        given = _mapping(path, settings, faults)
        cls = faults.attempt("plugins", find_component, "plugins", name)
        made = cls and _settled(path, cls, given, faults, threat)
        if made is None:
            continue
        if not isinstance(made, _PLUGIN_SHAPES):
            hooks = "before_epoch, after_epoch, change_attack, around_step, after_step, evaluated, prepare"
            faults.wrong.append(f"{path}: is not a plug-in: it has none of {hooks}")
        plugins.append((name.replace("-", "_"), made))
    return tuple(plugins)


# Values that only mean something elsewhere


def _check_values(parts: Mapping[str, Any], threat: ThreatSection, faults: _Faults) -> None:
    """Of the sections that could be built: whether what they name exists."""
    model, data, audit = parts.get("model"), parts.get("data"), parts.get("audit")
    augmentation, optimiser, validation = parts.get("augmentation"), parts.get("optimiser"), parts.get("validation")
    if model is not None:
        faults.attempt("model.name", check_model_name, model.name)
    if data is not None:
        _check_data(data, faults)
    if augmentation is not None and augmentation.rand_augment is not None:
        faults.attempt("augmentation.rand_augment", check_rand_augment, augmentation.rand_augment)
    if optimiser is not None:
        faults.attempt("optimiser.name", check_optimiser, optimiser.name)
    if validation is not None and validation.attack is not None:
        _attack("validation.attack", validation.attack, threat, faults)
    for name in audit.attacks if audit is not None else ():
        _attack("audit.attacks", name, threat, faults)


def _specs(data: DataSection) -> dict[str, str]:
    specs = {name: getattr(data, name) for name in ("train", "test", "validation", "extra", "easier")}
    return {name: spec for name, spec in specs.items() if spec is not None}


def _check_data(data: DataSection, faults: _Faults) -> None:
    requests = {
        name: faults.attempt(f"data.{name}", read_data_spec, spec, data.root) for name, spec in _specs(data).items()
    }
    train = requests["train"]
    if train is not None and train.split is None and ":" not in DATA_KINDS[train.kind].form:
        faults.wrong.append(f"data.train: '{train.spec}' means the test images; write {train.spec}@train")
    elif data.train == data.test:
        faults.wrong.append(f"data.test: '{data.test}' is what the model is trained on; choose another split")
