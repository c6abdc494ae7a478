"""Build the objects of a composed recipe; everything that is wrong with it is reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import timm
import timm.optim
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from vitadel.backbones.checkpoints import zoo_names
from vitadel.backbones.timm_models import is_timm_name, suggest_models
from vitadel.data.spec import DATA_KINDS, DataRequest, identity, parse_spec, same_images
from vitadel.errors import UserError, nearest_names
from vitadel.training.data_stream import rand_augment_policy
from vitadel.training.interfaces import (
    Adapter,
    BringsPlugin,
    ChecksObjective,
    ChecksPlugins,
    NeedsAdapter,
    NeedsLength,
    Objective,
    Plugin,
)
from vitadel.training.recipes.compose import SECTIONS, is_probe, section_types, unknown_section
from vitadel.training.recipes.instantiate import (
    Faults,
    as_mapping,
    component_names,
    find_component,
    given_values,
    guarded,
    instantiate,
    named_attack,
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
from vitadel.types import Calibrated

_NEEDED = ("model", "data", "objective", "train")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt")


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


# Values: models, data, optimizers, trackers, batch sizes; no data is opened


def check_values(parts: Mapping[str, Any], threat: ThreatSection, faults: Faults) -> None:
    """Check that what the sections name exists, also in sections with other faults; required keys may be missing."""
    augmentation, optimizer, validation = (parts[name] for name in ("augmentation", "optimizer", "validation"))
    if hasattr(parts.get("model"), "name"):
        faults.attempt("model.name", check_model_name, parts["model"].name)
    if hasattr(parts.get("data"), "train"):
        check_training_data(parts["data"], faults)
    if augmentation.auto_augment is not None:
        faults.attempt("augmentation.auto_augment", rand_augment_policy, augmentation.auto_augment)
    faults.attempt("optimizer.name", check_optimizer_name, optimizer.name)
    if "train" in parts:
        faults.attempt("train.tracker", check_tracker, parts["train"].tracker)
    if validation.attack is not None:
        made: object = named_attack("validation.attack", validation.attack, threat, faults)
        if isinstance(made, Calibrated):
            faults.wrong.append(
                f"validation.attack: '{validation.attack}' first studies the model on other images, which validation "
                "has no time for; put it into audit.attacks"
            )
    for name in parts["audit"].attacks:
        named_attack("audit.attacks", name, threat, faults)


def check_sections_agree(parts: Mapping[str, Any], faults: Faults) -> None:
    """Check settings that depend on those of another section."""
    data, train, augmentation = parts.get("data"), parts.get("train"), parts.get("augmentation")
    if train is not None and augmentation is not None:
        faults.attempt("train.batch_size", check_micro_batches, train, augmentation)
    if train is not None and data is not None:
        faults.attempt("data.extra_share", check_extra_share, data, train)


def check_model_name(name: str) -> None:
    """Refuse names that are no timm model, zoo model or path; others are checked when they are opened."""
    kind, colon, _ = name.partition(":")
    if colon and kind == "zoo" and name not in zoo_names():
        there = ", ".join(zoo_names()) or "none in this installation"
        raise UserError(f"unknown zoo model '{name}'; there is {there}{nearest_names(name, zoo_names())}")
    if colon and kind in ("zoo", "hf", "python"):
        return
    looks_like_a_path = "/" in name or name.startswith((".", "~")) or name.endswith(_FILES) or Path(name).exists()
    if not is_timm_name(name) and not looks_like_a_path:
        near = suggest_models(name.partition(".")[0], zoo_names())
        raise UserError(
            f"unknown model '{name}'{near} It is no timm name, no file and no folder; see `vitadel list models`"
        )


def check_optimizer_name(name: str) -> None:
    known = timm.optim.list_optimizers()
    if name not in known:
        raise UserError(
            f"timm has no optimizer '{name}'{nearest_names(name, known) or '; common ones are adamw and momentum'}"
        )
    if name == "adahessian":
        raise UserError(
            "'adahessian' needs second derivatives, which the loop does not compute; use e.g. adamw or momentum"
        )


def check_tracker(name: str) -> None:
    known = [kind.value for kind in LoggerType]
    if name not in ("none", *known):
        raise UserError(f"there is no tracker '{name}'; there is none, {', '.join(known)}{nearest_names(name, known)}")
    installed = [kind.value for kind in get_available_trackers()]
    if name not in ("none", "all", *installed):
        raise UserError(
            f"'{name}' is not installed; install it, or take one of none{''.join(f', {other}' for other in installed)}"
        )


def check_micro_batches(train: TrainSection, augmentation: Augmentation, processes: int = 1) -> None:
    """Refuse a batch that `grad_accum` does not divide; several processes divide each micro-batch further."""
    if train.batch_size % train.grad_accum:
        raise UserError(f"a batch of {train.batch_size} images cannot be split into {train.grad_accum} equal parts")
    parts = train.grad_accum * processes
    if train.batch_size // parts % 2 and (augmentation.mixup or augmentation.cutmix):
        shared = f" in {processes} processes" if processes > 1 else ""
        raise UserError(
            f"mixup and cutmix mix images in pairs, so each micro-batch needs an even number of images; batch_size "
            f"{train.batch_size} with grad_accum {train.grad_accum}{shared} gives {train.batch_size // parts}; choose "
            f"a multiple of {2 * parts} for train.batch_size"
        )


def check_extra_share(data: DataSection, train: TrainSection) -> None:
    extra = round(data.extra_share * train.batch_size)
    if data.extra is not None and extra in (0, train.batch_size):
        what = "no image" if extra == 0 else "every image"
        raise UserError(
            f"with {data.extra_share:g} of a batch of {train.batch_size}, {what} would come from data.extra; choose "
            "another share or a larger train.batch_size"
        )


def read_data_spec(spec: str, root: str | None) -> DataRequest:
    """Parse a data spec and check its kind and path; the data is not opened."""
    request = parse_spec(spec, root=Path(root or "data"), split=None)
    kind = DATA_KINDS.get(request.kind)
    if kind is None:
        near = nearest_names(request.kind, DATA_KINDS) or "."
        raise UserError(f"unknown data '{spec}'{near} Known: {', '.join(DATA_KINDS)}")
    if ":" in kind.form and not request.argument:
        raise UserError(f"'{spec}' names no path; write {kind.form}")
    if ":" in spec and ":" not in kind.form:
        raise UserError(f"'{spec}': {request.kind} takes no path; write {kind.form}, and data.root if need be")
    return request


def data_specs(data: DataSection) -> dict[str, str]:
    specs = {name: getattr(data, name) for name in ("train", "test", "validation", "extra", "easier")}
    return {name: spec for name, spec in specs.items() if spec is not None}


def check_training_data(data: DataSection, faults: Faults) -> None:
    """Check all data specs, and that no model is selected or tested on images it is trained on."""
    requests = {name: _request(f"data.{name}", spec, data, faults) for name, spec in data_specs(data).items()}
    train, test = requests["train"], requests.pop("test", None)
    _check_selection(data, requests, faults)
    if not names_split(train, faults):
        del requests["train"]
    for name, request in requests.items():
        check_not_test(f"data.{name}", request, test, "selected" if name == "validation" else "trained", faults)


def names_split(train: DataRequest | None, faults: Faults) -> bool:
    """Whether training data of a kind with splits names its split; a fault is added if not."""
    if train is None or train.split is not None or ":" in DATA_KINDS[train.kind].form:
        return True
    faults.wrong.append(f"data.train: '{train.spec}' means the test images; write {train.spec}@train")
    return False


def check_not_test(path: str, request: DataRequest | None, test: DataRequest | None, use: str, faults: Faults) -> None:
    """Add a fault if the images are those of the test set; they are `use`d ('trained', 'selected') on."""
    if request is not None and test is not None and faults.attempt(path, same_images, request, test):
        faults.wrong.append(
            f"{path}: '{request.spec}' are the images of data.test, '{test.spec}': a model {use} on them is not tested "
            "by them; choose another split"
        )


def _request(path: str, spec: str, data: DataSection, faults: Faults) -> DataRequest | None:
    """The parsed spec; None if it is wrong, which is reported once, whatever it is compared with later."""
    request = faults.attempt(path, read_data_spec, spec, data.root)
    return request if request is not None and faults.attempt(path, identity, request) is not None else None


def _check_selection(data: DataSection, requests: Mapping[str, DataRequest | None], faults: Faults) -> None:
    """Models are selected on data.validation, or on images held out from data.train: never on what they train on."""
    trained = ("train", "easier", "extra") if data.validation is not None else ("extra",)
    selected = requests["train"] if data.validation is None else requests["validation"]
    for name in trained:
        request = requests.get(name)
        if request and selected and same_images(request, selected):
            faults.wrong.append(
                f"data.{name}: '{request.spec}' holds the images that models are selected on, '{selected.spec}'; "
                "choose another split"
            )
