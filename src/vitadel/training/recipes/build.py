"""From a recipe's document to the objects it means; whatever is wrong with it is told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

from vitadel.backbones.classifier import Classifier
from vitadel.data.overlap import identity, same_images
from vitadel.data.spec import DATA_KINDS, DataRequest
from vitadel.errors import UserError
from vitadel.heads.probe_recipe import build_probe, build_probe_check
from vitadel.training.plugins.overfitting_guard import OverfittingGuard
from vitadel.training.protocols import Accompanied, Adapter, ChangesEvaluation, NeedsAdapter, Objective, Plugin
from vitadel.training.recipes.check import (
    check_auto_augment,
    check_extra_share,
    check_model_name,
    check_optimizer_name,
    check_parts,
    check_tracker,
    class_count,
    read_data_spec,
    sketched_model,
)
from vitadel.training.recipes.components import component_names, find_component
from vitadel.training.recipes.documents import SECTIONS, TEXTS, compose, is_probe, rows, section_types, unknown_section
from vitadel.training.recipes.instantiate import Faults, Faulty, as_given, as_mapping, guarded, named_attack, settled
from vitadel.training.recipes.sections import (
    AuditSection,
    Augmentation,
    DataSection,
    ModelSection,
    OptimizerSection,
    Schedule,
    ThreatSection,
    TrainSection,
    Validation,
)
from vitadel.types import Calibrated, Threat

__all__ = ["ChecksModel", "ChecksObjective", "Recipe", "build_check", "build_recipe", "check_recipe"]

_NEEDED = ("model", "data", "objective", "train")


@runtime_checkable
class ChecksObjective(Protocol):
    """A plug-in that can tell from the recipe alone that it does not go with the rest of it."""

    def check_objective(self, objective: Objective, threat: Threat) -> None:
        """A `UserError` if it cannot work with this objective and its attack, or this budget."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """A plug-in or adapter that can tell from the bare model that it does not go with it."""

    def check_model(self, model: Classifier) -> None:
        """A `UserError` if it cannot work with this model, which has no weights and is not to be changed."""
        ...


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
    adapter: Adapter
    optimizer: OptimizerSection
    schedule: Schedule
    train: TrainSection
    validation: Validation
    audit: AuditSection
    document: dict[str, Any]


def build_recipe(document: Mapping[str, Any], where: str) -> Recipe:
    """Build every part but the model and the data; `where` names the recipe in messages.

    Raises one `Faulty` with all faults: keys that do not exist, then those that are missing, then values that are no
    good. Attacks are made with the recipe's own threat.
    """
    if is_probe(document):
        raise UserError(f"recipe {where} trains a head on frozen features, not a model: run it with `vitadel probe`")
    faults = Faults()
    faults.unknown += [unknown_section(key, document) for key in document if key not in (*TEXTS, *SECTIONS)]
    for key in _NEEDED:
        if key not in document:
            faults.missing.append(f"it needs '{key}'")
    for key in TEXTS:
        if key in document and not isinstance(document[key], str):
            faults.wrong.append(f"{key}: should be a text, got {document[key]!r}")
    types = {name: cls for name, cls in section_types().items() if name in document or name not in _NEEDED}
    given = {name: as_mapping(name, document.get(name), faults) for name in types}
    parts = {name: settled(name, cls, given[name], faults) for name, cls in types.items()}
    # With a threat that is no good the names of attacks are still worth checking.
    threat = parts["threat"] if isinstance(parts["threat"], ThreatSection) else ThreatSection()
    objective = _objective(document.get("objective"), threat, faults)
    plugins = _plugins(as_mapping("plugins", document.get("plugins"), faults), threat, faults)
    adapter = _adapter(document.get("adapter"), faults)
    told = {name: part or as_given(name, types[name], given[name]) for name, part in parts.items()}
    _check_values(told, threat, faults)
    _check_together(parts, faults)
    faults.attempt("plugins", _check_rollback, plugins)
    if objective is not None and adapter is not None:
        faults.attempt("adapter", _check_adapter, objective, adapter)
    if objective is not None and isinstance(parts["threat"], ThreatSection):
        for name, plugin in plugins:
            if isinstance(plugin, ChecksObjective):
                faults.attempt(f"plugins.{name}", guarded(plugin.check_objective), objective, threat.threat())
    if faults.all():
        raise Faulty(where, faults.all())
    assert objective is not None
    assert adapter is not None
    about = {key: document[key] for key in TEXTS if key in document}
    sections = cast(dict[str, Any], parts)
    whole = dict(document)
    if isinstance(objective, Accompanied):
        plugins = (objective.companion, *plugins)
    return Recipe(about=about, objective=objective, plugins=plugins, adapter=adapter, document=whole, **sections)


def build_check(recipe: Recipe, where: str) -> None:
    """Build the model as well, without memory for its weights, and send an image through it; nothing is trained."""
    faults = Faults()
    counts = {name: class_count(spec) for name, spec in _specs(recipe.data).items()}
    known = {name: count for name, count in counts.items() if count is not None}
    if recipe.model.num_classes is not None:
        known["model.num_classes"] = recipe.model.num_classes
    if recipe.model.head_classes is not None:
        known["model.head_classes"] = len(recipe.model.head_classes)
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in known.items())
        faults.wrong.append(f"data: the numbers of classes do not agree: {told}")
    else:
        section = replace(recipe.model, num_classes=next(iter(known.values()), 10))
        # As a text: what YAML reads as a date is no argument of any model, and is told as such.
        model = faults.attempt("model", sketched_model, json.dumps(asdict(section), default=str))
        for name, plugin in recipe.plugins if model is not None else ():
            if isinstance(plugin, ChecksModel):
                faults.attempt(f"plugins.{name}", guarded(plugin.check_model), model)
        if model is not None and isinstance(recipe.adapter, ChecksModel):
            faults.attempt("adapter", guarded(recipe.adapter.check_model), model)
    if faults.all():
        raise Faulty(where, faults.all())


def check_recipe(name: str) -> str | None:
    """What is wrong with a recipe, over all its rows, or None; nothing is trained and no data is opened."""
    try:
        every: list[str | None] = [*rows(name)] or [None]
    except UserError as mistake:
        return str(mistake)
    found: dict[str, list[str]] = {}
    for row in every:
        where = name if row is None else f"{name} (row {row})"
        try:
            _check_document(compose(name, row), where)
        except UserError as mistake:
            for fault in mistake.faults if isinstance(mistake, Faulty) else (str(mistake),):
                found.setdefault(fault, []).append(row or "")
    if not found:
        return None
    return str(Faulty(name, (f"{fault}{_in_rows(places, len(every))}" for fault, places in found.items())))


def _check_document(document: Mapping[str, Any], where: str) -> None:
    if is_probe(document):
        build_probe_check(build_probe(document, where), where)
    else:
        build_check(build_recipe(document, where), where)


def _in_rows(places: list[str], total: int) -> str:
    return "" if len(places) == total else f" (row{'s' if len(places) > 1 else ''} {', '.join(places)})"


# Objectives and plug-ins


def _objective(section: object, threat: ThreatSection, faults: Faults) -> Objective | None:
    if section is None:
        return None  # told as a missing section
    given = dict(as_mapping("objective", section, faults))
    name = given.pop("use", None)
    if not isinstance(name, str):
        faults.missing.append(f"objective: needs 'use', one of {', '.join(component_names('objectives'))}")
        return None
    cls = faults.attempt("objective", find_component, "objectives", name)
    return cast(Objective | None, cls and settled("objective", cls, given, faults, threat))


def _adapter(section: object, faults: Faults) -> Adapter | None:
    """The whole model, unless the recipe says otherwise."""
    given = {"use": "whole_model", **as_mapping("adapter", section, faults)}
    name = given.pop("use")
    if not isinstance(name, str):
        faults.wrong.append(f"adapter: 'use' should be one of {', '.join(component_names('trainables'))}, got {name!r}")
        return None
    cls = faults.attempt("adapter", find_component, "trainables", name)
    return cast(Adapter | None, cls and settled("adapter", cls, given, faults))


def _check_adapter(objective: Objective, adapter: Adapter) -> None:
    """An adapter of the user's own may hold what the objective needs; of ours it is known which does."""
    if not isinstance(objective, NeedsAdapter):
        return
    own = {name: find_component("trainables", name) for name in component_names("trainables")}
    needed = own.get(objective.adapter)  # an objective of the user's own may mean anything by it
    if needed is not None and type(adapter) in own.values() and not isinstance(adapter, needed):
        name = objective.adapter
        raise UserError(f"this objective trains {name} and nothing else of a model; write `use: {name}`")


def _plugins(section: Mapping[str, Any], threat: ThreatSection, faults: Faults) -> tuple[tuple[str, Plugin], ...]:
    plugins: dict[str, Plugin] = {}
    spelled: dict[str, str] = {}
    for name, settings in section.items():
        path = f"plugins.{name}"
        given = as_mapping(path, settings, faults)
        plain = name.replace("-", "_")
        if plain in spelled:
            faults.wrong.append(f"{path}: is the same plug-in as '{spelled[plain]}'; keep one of them")
            continue
        spelled[plain] = name
        cls = faults.attempt("plugins", find_component, "plugins", name)
        made = cls and settled(path, cls, given, faults, threat)
        if made is not None:
            plugins[plain] = made
    return tuple(plugins.items())


def _check_rollback(plugins: tuple[tuple[str, Plugin], ...]) -> None:
    rolls_back = any(isinstance(plugin, OverfittingGuard) and plugin.action == "rollback" for _, plugin in plugins)
    if rolls_back and any(isinstance(plugin, ChangesEvaluation) for _, plugin in plugins):
        raise UserError(
            "overfitting_guard can roll back weights, but not an average that already holds the overfitted epoch; with "
            "weight_average use action: stop, after which weights/best is still there"
        )


# Values that only mean something elsewhere


def _check_values(parts: Mapping[str, Any], threat: ThreatSection, faults: Faults) -> None:
    """Whether what the sections name exists, also of those that have other faults; what they need may be missing."""
    augmentation, optimizer, validation = (parts[name] for name in ("augmentation", "optimizer", "validation"))
    if hasattr(parts.get("model"), "name"):
        faults.attempt("model.name", check_model_name, parts["model"].name)
    if hasattr(parts.get("data"), "train"):
        _check_data(parts["data"], faults)
    if augmentation.auto_augment is not None:
        faults.attempt("augmentation.auto_augment", check_auto_augment, augmentation.auto_augment)
    faults.attempt("optimizer.name", check_optimizer_name, optimizer.name)
    if "train" in parts:
        faults.attempt("train.tracker", check_tracker, parts["train"].tracker)
    if validation.attack is not None:
        made: object = named_attack("validation.attack", validation.attack, threat, faults)
        if isinstance(made, Calibrated):
            faults.wrong.append(
                f"validation.attack: '{validation.attack}' first studies the model on other images, which validation "
                "has no time for; it belongs into audit.attacks"
            )
    for name in parts["audit"].attacks:
        named_attack("audit.attacks", name, threat, faults)


def _check_together(parts: Mapping[str, Any], faults: Faults) -> None:
    """Whether sections agree, of those that could be built."""
    data, train, augmentation = parts.get("data"), parts.get("train"), parts.get("augmentation")
    if train is not None and augmentation is not None:
        faults.attempt("train.batch_size", check_parts, train, augmentation)
    if train is not None and data is not None:
        faults.attempt("data.extra_share", check_extra_share, data, train)


def _specs(data: DataSection) -> dict[str, str]:
    specs = {name: getattr(data, name) for name in ("train", "test", "validation", "extra", "easier")}
    return {name: spec for name, spec in specs.items() if spec is not None}


def _request(path: str, spec: str, data: DataSection, faults: Faults) -> DataRequest | None:
    """What a spec asks for; None if it is wrong, which is told once, whatever it is compared with later."""
    request = faults.attempt(path, read_data_spec, spec, data.root)
    return request if request is not None and faults.attempt(path, identity, request) is not None else None


def _check_selection(data: DataSection, requests: Mapping[str, DataRequest | None], faults: Faults) -> None:
    """Models are selected on data.validation, or on images held out from data.train: never on what they learn from."""
    learned = ("train", "easier", "extra") if data.validation is not None else ("extra",)
    selected = requests["train"] if data.validation is None else requests["validation"]
    for name in learned:
        request = requests.get(name)
        if request and selected and same_images(request, selected):
            faults.wrong.append(
                f"data.{name}: '{request.spec}' holds the images that models are selected on, '{selected.spec}'; "
                "choose another split"
            )


def _check_data(data: DataSection, faults: Faults) -> None:
    requests = {name: _request(f"data.{name}", spec, data, faults) for name, spec in _specs(data).items()}
    train, test = requests["train"], requests.pop("test", None)
    _check_selection(data, requests, faults)
    if train is not None and train.split is None and ":" not in DATA_KINDS[train.kind].form:
        faults.wrong.append(f"data.train: '{train.spec}' means the test images; write {train.spec}@train")
        del requests["train"]
    for name, request in requests.items():
        if request is None or test is None or not same_images(request, test):
            continue
        use = "selected on" if name == "validation" else "trained on"
        faults.wrong.append(
            f"data.{name}: '{request.spec}' are the images of data.test, '{test.spec}': a model {use} them is not "
            "tested by them; choose another split"
        )
