"""Build the objects of a composed recipe; everything that is wrong with it is reported at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from vitadel.errors import UserError
from vitadel.training.interfaces import (
    Adapter,
    BringsPlugin,
    ChecksModel,
    ChecksObjective,
    ChecksPlugins,
    NeedsAdapter,
    NeedsLength,
    Objective,
    Plugin,
)
from vitadel.training.recipes.check import (
    check_class_counts,
    check_sections_agree,
    check_values,
    class_count,
    data_specs,
    meta_model,
)
from vitadel.training.recipes.compose import SECTIONS, compose, is_probe, rows, section_types, unknown_section
from vitadel.training.recipes.instantiate import (
    Faults,
    Faulty,
    as_mapping,
    component_names,
    find_component,
    given_values,
    guarded,
    instantiate,
)
from vitadel.training.recipes.training_sections import (
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
from vitadel.training.recipes.yaml_files import TEXTS
from vitadel.training.starting_model import contradictions

_NEEDED = ("model", "data", "objective", "train")


@dataclass(frozen=True)
class Recipe:
    """A recipe ready to be trained: its sections, and the objective, plug-ins and adapter they name.

    `document` is the composed document it was built from.
    """

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

    @property
    def epochs(self) -> int:
        """All epochs, with those of the cooldown."""
        return self.train.epochs + self.schedule.cooldown_epochs


def build_recipe(document: Mapping[str, Any], where: str) -> Recipe:
    """Build everything but the model and the data; `where` names the recipe in messages.

    Raises one `Faulty` with all faults: unknown keys, then missing ones, then wrong values. Attacks are made with the
    recipe's own threat model.
    """
    if is_probe(document):
        raise UserError(f"recipe {where} trains a head on frozen features, not a model: run it with `vitadel probe`")
    faults = check_outline(document, SECTIONS, _NEEDED, TEXTS)
    types = {name: cls for name, cls in section_types().items() if name in document or name not in _NEEDED}
    given = {name: as_mapping(name, document.get(name), faults) for name in types}
    parts = {name: instantiate(name, cls, given[name], faults) for name, cls in types.items()}
    # With a wrong threat section the names of attacks are still worth checking.
    threat = parts["threat"] if isinstance(parts["threat"], ThreatSection) else ThreatSection()
    objective: Objective | None = None
    if "objective" in document:
        objective = _component("objective", document["objective"], faults, threat)
    adapter: Adapter | None = _component("adapter", document.get("adapter"), faults, default="whole_model")
    plugins = _plugins(as_mapping("plugins", document.get("plugins"), faults), threat, faults)
    values = {name: part or given_values(name, types[name], given[name]) for name, part in parts.items()}
    check_values(values, threat, faults)
    check_sections_agree(parts, faults)
    for _, plugin in plugins:
        if isinstance(plugin, ChecksPlugins):
            faults.attempt("plugins", guarded(plugin.check_plugins), [other for _, other in plugins])
    if isinstance(train := parts.get("train"), TrainSection) and isinstance(parts["schedule"], Schedule):
        epochs = train.epochs + parts["schedule"].cooldown_epochs
        for name, plugin in plugins:
            if isinstance(plugin, NeedsLength):
                faults.attempt(f"plugins.{name}", guarded(plugin.check_length), epochs)
    if objective is not None and adapter is not None:
        faults.attempt("adapter", _check_adapter, objective, adapter)
    if objective is not None and isinstance(parts["threat"], ThreatSection):
        for name, plugin in plugins:
            if isinstance(plugin, ChecksObjective):
                faults.attempt(f"plugins.{name}", guarded(plugin.check_objective), objective, threat.threat())
    faults.raise_if_any(where)
    assert objective is not None
    assert adapter is not None
    if isinstance(objective, BringsPlugin):
        plugins = (objective.companion, *plugins)
    sections = cast(dict[str, Any], parts)
    return Recipe(objective=objective, plugins=plugins, adapter=adapter, document=dict(document), **sections)


def check_outline(
    document: Mapping[str, Any], sections: Sequence[str], needed: Sequence[str], texts: Sequence[str]
) -> Faults:
    """Faults of a document as a whole: unknown and missing sections, and `texts` that are no texts."""
    return Faults(
        unknown=[unknown_section(key, document) for key in document if key not in (*TEXTS, *sections)],
        missing=[f"it needs '{key}'" for key in needed if key not in document],
        wrong=[
            f"{key}: should be a text, got {document[key]!r}"
            for key in texts
            if key in document and not isinstance(document[key], str)
        ],
    )


def check_model(recipe: Recipe, where: str) -> None:
    """Build the model as well, without memory for its weights, and pass an image through it; nothing is trained."""
    faults = Faults()
    kept = recipe.model.head_classes
    given = {
        **{name: class_count(spec) for name, spec in data_specs(recipe.data).items()},
        "model.num_classes": recipe.model.num_classes,
        "model.head_classes": None if kept is None else len(kept),
    }
    counts = check_class_counts(given, faults)
    if len(counts) < 2:
        model = faults.attempt("model", meta_model, replace(recipe.model, num_classes=next(iter(counts), 10)))
        checked = {f"plugins.{name}": plugin for name, plugin in recipe.plugins} | {"adapter": recipe.adapter}
        for path, part in checked.items() if model is not None else ():
            if isinstance(part, ChecksModel):
                faults.attempt(path, guarded(part.check_model), model)
    faults.raise_if_any(where)


def check_recipe(name: str, check_probe: Callable[[Mapping[str, Any], str], None]) -> str | None:
    """Everything that is wrong with a recipe, over all its rows, or None; nothing is trained and no data is opened.

    `check_probe` raises `UserError` for a document of a probe recipe.
    """
    try:
        every: list[str | None] = [*rows(name)] or [None]
    except UserError as error:
        return str(error)
    found: dict[str, list[str]] = {}
    for row in every:
        where = name if row is None else f"{name} (row {row})"
        try:
            document = compose(name, row)
            if is_probe(document):
                check_probe(document, where)
            else:
                check_model(build_recipe(document, where), where)
        except UserError as error:
            for fault in error.faults if isinstance(error, Faulty) else (str(error),):
                found.setdefault(fault, []).append(row or "")
    if not found:
        return None
    return str(Faulty(name, (f"{fault}{_in_rows(places, len(every))}" for fault, places in found.items())))


def recipe_warnings(name: str) -> list[str]:
    """What a recipe without faults contradicts in the weights that it starts from, over all its rows."""
    every: list[str | None] = [*rows(name)] or [None]
    documents = [compose(name, row) for row in every]
    starting = [each for each in documents if not is_probe(each) and (each.get("model") or {}).get("weights")]
    return list(dict.fromkeys(text for each in starting for text in contradictions(build_recipe(each, name).model)))


def _in_rows(places: list[str], total: int) -> str:
    return "" if len(places) == total else f" (row{'s' if len(places) > 1 else ''} {', '.join(places)})"


# Objective, plug-ins and adapter


def _component(
    kind: str, section: object, faults: Faults, threat: ThreatSection | None = None, default: str | None = None
) -> Any:
    """The objective or adapter that a section names by `use`; None with a fault."""
    given = {"use": default, **as_mapping(kind, section, faults)}
    name = given.pop("use")
    if not isinstance(name, str):
        faults.missing.append(f"{kind}: needs 'use', one of {', '.join(component_names(kind))}, got {name!r}")
        return None
    cls = faults.attempt(kind, find_component, kind, name)
    return cls and instantiate(kind, cls, given, faults, threat)


def _check_adapter(objective: Objective, adapter: Adapter) -> None:
    """Refuse a built-in adapter that an objective cannot train; a user's own may contain what it needs."""
    if not isinstance(objective, NeedsAdapter):
        return
    known = {name: find_component("adapter", name) for name in component_names("adapter")}
    needed = known.get(objective.adapter)  # None for a user's objective that means an adapter of its own
    if needed is not None and type(adapter) in known.values() and not isinstance(adapter, needed):
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
        cls = faults.attempt("plugins", find_component, "plug-in", name)
        made = cls and instantiate(path, cls, given, faults, threat)
        if made is not None:
            plugins[plain] = made
    return tuple(plugins.items())
