"""Instantiate the objects that a recipe names; all faults are collected instead of raised one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib import import_module
from types import NoneType, SimpleNamespace
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from vitadel.attacks.parse import make, split_attack_list
from vitadel.backbones.third_party import user_code
from vitadel.errors import UserError, nearest_names
from vitadel.training.recipes.training_sections import ThreatSection
from vitadel.training.recipes.yaml_files import OTHER_WORDS
from vitadel.types import Attack, Calibrated

Made = TypeVar("Made")

_COMPONENTS = {
    "objective": {
        "adversarial": "objectives.cross_entropy.Adversarial",
        "afat": "objectives.afat.Afat",
        "mart": "objectives.mart.Mart",
        "mimir": "objectives.masked_images.Mimir",
        "robustness_tokens": "objectives.token_features.RobustnessTokens",
        "standard": "objectives.cross_entropy.Standard",
        "tora": "objectives.two_branches.TwoBranches",
        "trades": "objectives.trades.Trades",
    },
    "plug-in": {
        "attention_scaling": "plugins.attention_scaling.AttentionScaling",
        "awp": "plugins.awp.AWP",
        "epsilon_warmup": "plugins.epsilon_warmup.EpsilonWarmup",
        "overfitting_guard": "plugins.overfitting_guard.OverfittingGuard",
        "patch_augmentation": "plugins.patch_augmentation.PatchAugmentation",
        "random_dropping": "plugins.random_dropping.RandomDropping",
        "weight_average": "plugins.weight_average.WeightAverage",
    },
    "adapter": {
        "masked_autoencoder": "trainables.autoencoder.Autoencoder",
        "tokens": "trainables.secret_tokens.SecretTokens",
        "tora": "trainables.tora_parts.ToraParts",
        "whole_model": "trainables.whole_model.WholeModel",
    },
}
"""Names in recipes, by kind, and their classes below vitadel.training."""

_METHODS = {
    "objective": ("__call__", "attack"),
    "adapter": ("attach", "shown", "state", "load_state", "save", "deployed"),
}
_HOOKS = (
    "before_epoch",
    "after_epoch",
    "change_attack",
    "change_batch",
    "around_step",
    "after_step",
    "evaluated",
    "prepare",
)


class Faulty(UserError):
    """Everything that is wrong with one recipe, or one row of it."""

    def __init__(self, where: str, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        problems = "1 problem" if len(self.faults) == 1 else f"{len(self.faults)} problems"
        super().__init__("\n  - ".join([f"recipe {where} has {problems}:", *self.faults]))


@dataclass
class Faults:
    """The faults found so far, in the order in which they are listed."""

    unknown: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        return [*self.unknown, *self.missing, *self.wrong]

    def raise_if_any(self, where: str) -> None:
        if self.all():
            raise Faulty(where, self.all())

    def attempt(self, path: str, function: Callable[..., Made], /, *arguments: object, **named: object) -> Made | None:
        """The function's result; None if it raised a `UserError`, which is added under `path`."""
        try:
            return function(*arguments, **named)
        except UserError as error:
            self.wrong.append(f"{path}: {error}")
            return None


def guarded(function: Callable[..., Made]) -> Callable[..., Made]:
    """For classes that may be the user's own: turn any exception into a `UserError`."""

    def call(*arguments: object, **named: object) -> Made:
        try:
            return function(*arguments, **named)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"it failed with {type(error).__name__}: {error}") from error

    return call


# Classes by name


def component_names(kind: str) -> list[str]:
    """Names of the 'objective's, 'plug-in's or 'adapter's that come with the package."""
    return list(_COMPONENTS[kind])


def find_component(kind: str, name: str) -> type:
    """The class of a built-in name, with dashes or underscores, or of a dotted path to a class of the user's.

    A dotted path imports its module. The class is inspected and not called: any class of any library can be named,
    and some have side effects when they are instantiated.
    """
    if "." in name:
        found = _import_class(name)
        _check_methods(kind, name, found)
        return found
    known, plain = _COMPONENTS[kind], name.replace("-", "_")
    if plain not in known:
        raise UserError(
            f"there is no {kind} '{name}'; there is {', '.join(known)}{nearest_names(plain, known) or '.'} "
            "Name one of your own as package.module.Class"
        )
    module, _, class_name = known[plain].rpartition(".")
    ours: type = getattr(import_module(f"vitadel.training.{module}"), class_name)
    return ours


def _import_class(name: str) -> type:
    module_name, _, class_name = name.rpartition(".")
    try:
        with user_code():
            module = import_module(module_name)
        found = getattr(module, class_name, None)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and scripts may exit
        raise UserError(f"'{name}': importing '{module_name}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        near = nearest_names(class_name, classes)
        raise UserError(f"'{name}': module '{module_name}' has no class '{class_name}'{near}")
    return found


def _check_methods(kind: str, name: str, cls: type) -> None:
    if not is_dataclass(cls):
        raise UserError(f"'{name}' is not a dataclass, as every {kind} is: its fields are the settings")
    has = {key for base in cls.__mro__ for key in vars(base)} | {each.name for each in fields(cls)}
    if kind == "plug-in" and not has.intersection(_HOOKS):
        raise UserError(f"'{name}' is not a plug-in: it has none of {', '.join(_HOOKS)}")
    if missing := [key for key in _METHODS.get(kind, ()) if key not in has]:
        needs = "; it needs `__call__(model, x, z, y)` and `attack`, a field or property" if kind == "objective" else ""
        article = "an" if kind[0] in "ao" else "a"
        raise UserError(f"'{name}' is not {article} {kind}: it has no {' and no '.join(missing)}{needs}")


# Objects from settings


def as_mapping(path: str, value: object, faults: Faults) -> Mapping[str, Any]:
    if value is None or isinstance(value, Mapping):
        return value or {}
    faults.wrong.append(f"{path}: should be keys with values, got {value!r}")
    return {}


def instantiate(
    path: str, cls: Callable[..., Made], given: Mapping[str, Any], faults: Faults, threat: ThreatSection | None = None
) -> Made | None:
    """`cls` called with the settings; None if any of them is a fault. Attacks are made with `threat`."""
    before = len(faults.all())
    parameters = inspect.signature(cls).parameters
    hints = _type_hints(cls)
    # A null removes a setting, so that its default holds, unless null is a value of it or the setting does not exist.
    given = {
        key: value
        for key, value in given.items()
        if value is not None or key not in hints or NoneType in get_args(hints[key])
    }
    for key in given:
        if key not in parameters:
            takes = f"it takes {', '.join(parameters)}" if parameters else "it takes nothing"
            faults.unknown.append(f"{path}: has no '{key}'; {takes}{_suggestion(key, parameters)}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in given:
            faults.missing.append(f"{path}: needs '{key}'")
    values = {}
    for key, value in given.items():
        if key in parameters:
            values[key] = _convert(f"{path}.{key}", key, hints.get(key), value, faults, threat)
    return faults.attempt(path, guarded(cls), **values) if len(faults.all()) == before else None


def given_values(path: str, cls: Any, given: Mapping[str, Any]) -> Any:
    """The valid settings and defaults of a section that cannot be built.

    What they name is then checked all the same, and one fault does not hide another.
    """
    hints = get_type_hints(cls)
    known = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
    for key in given.keys() & hints.keys():
        faults = Faults()
        value = _convert(f"{path}.{key}", key, hints[key], given[key], faults, None)
        if not faults.all():
            known[key] = value
    return SimpleNamespace(**known)


def _suggestion(key: str, known: Mapping[str, object]) -> str:
    other = OTHER_WORDS.get(key)
    return f"; did you mean {other}?" if other in known else nearest_names(key, known)


def _type_hints(cls: Any) -> dict[str, Any]:
    """Types of the settings; those of a user's class may exist for type checkers only."""
    try:
        return get_type_hints(cls)
    except Exception:  # they are code, evaluated here
        return {}


def _convert(path: str, key: str, hint: Any, value: Any, faults: Faults, threat: ThreatSection | None) -> Any:
    if threat is not None and (Attack in (hint, *get_args(hint)) or (hint is None and key == "attack")):
        return _training_attack(path, value, threat, faults)
    if path == "audit.attacks" and isinstance(value, str):
        return tuple(faults.attempt(path, split_attack_list, value) or ())
    if hint is None:
        return value
    try:
        # Pydantic turns texts into numbers, which is welcome, and true into 1, which is not.
        return TypeAdapter(hint).validate_python(value, strict=isinstance(value, bool))
    except PydanticUserError:  # a type that it does not know, such as a class of the user's
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
            "to train against scaled attention, use the plug-in attention_scaling"
        )
        return None
    return attack


def named_attack(path: str, name: object, threat: ThreatSection, faults: Faults) -> Attack | None:
    if not isinstance(name, str):
        faults.wrong.append(f"{path}: should be the name of an attack, e.g. pgd-10(step=2/255), got {name!r}")
        return None
    return faults.attempt(path, make, name, eps=threat.eps, norm=threat.norm)
